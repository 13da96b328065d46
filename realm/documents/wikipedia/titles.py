"""Titles of pages that are no articles."""

from realm.documents.formats.records import DISAMBIGUATION, LISTS

_LISTS = ("List of ", "Lists of ", "Index of ", "Outline of ")


def not_an_article(title: str) -> str | None:
    """The reason for leaving a page out by its title, as ORQA does; None for an article.

    >>> not_an_article("List of rivers"), not_an_article("Rivers")
    ('lists, indexes and outlines', None)
    """
    if title.startswith(_LISTS):
        return LISTS
    return DISAMBIGUATION if "(disambiguation)" in title else None
