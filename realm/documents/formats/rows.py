"""Rows of tables as sentences, which keep their meaning in a passage without the heading of the table."""

from collections.abc import Sequence


def sentence_of(headings: Sequence[str], cells: Sequence[str]) -> str:
    """The cells of a row, each after the heading of its column. Empty cells are left out.

    >>> sentence_of(["Country", "", "Capital"], ["France", "Europe", "Paris"])
    'Country: France; Europe; Capital: Paris.'
    >>> sentence_of(["Question", "Answer"], ["What is it?", "A town."])
    'Question: What is it?; Answer: A town.'
    """
    pairs = zip(headings, cells, strict=True)
    sentence = "; ".join(f"{name}: {cell}" if name else cell for name, cell in pairs if cell)
    return sentence if sentence.endswith((".", "!", "?")) else f"{sentence}."
