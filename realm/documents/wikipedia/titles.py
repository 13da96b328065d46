"""Recognises from its title whether a page is not an article."""

from realm.documents.formats.records import DISAMBIGUATION, LISTS

_LISTS = ("List of ", "Lists of ", "Index of ", "Outline of ")


def not_an_article(title: str) -> str | None:
    """The reason why a page with this title is left out, by the rules of ORQA and for titles that begin with "Lists of"; None
    for an article.

    >>> not_an_article("List of rivers"), not_an_article("Rivers")
    ('lists, indexes and outlines', None)
    """
    if title.startswith(_LISTS):
        return LISTS
    return DISAMBIGUATION if "(disambiguation)" in title else None
