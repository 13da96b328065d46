"""Titles of pages: of the page to which a link leads, and of pages that are not articles."""

from realm.documents.formats.records import Reason


def linked_title(target: str) -> str:
    """The title of the page to which a link with this target leads; "" for a link inside the same page.

    >>> linked_title("ouse_(river)#Bed"), linked_title("#Bed")
    ('Ouse (river)', '')
    """
    title = " ".join(target.partition("#")[0].replace("_", " ").split())
    return title[:1].upper() + title[1:]


MOST_REDIRECTS = 3
"""Most redirects that are followed one after the other, because redirects can lead in a circle."""
_LISTS = ("List of ", "Lists of ", "Index of ", "Outline of ")


def not_an_article(title: str) -> Reason | None:
    """The reason why a page with this title is left out, by the rules of ORQA and for titles that begin with "Lists of"; None
    for an article.

    >>> not_an_article("List of rivers"), not_an_article("Rivers")
    (<Reason.LISTS: 'lists, indexes and outlines'>, None)
    """
    if title.startswith(_LISTS):
        return Reason.LISTS
    return Reason.DISAMBIGUATION if "(disambiguation)" in title else None
