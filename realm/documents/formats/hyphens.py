"""Words that are divided at the end of a line become whole again."""

import re
from collections import Counter

_LETTER = r"[^\W\d_]"
_WORD = re.compile(rf"{_LETTER}+(?:-{_LETTER}+)*")
_HALF = re.compile(rf"{_WORD.pattern}|\d+")
_SOFT = re.compile(rf"(?<={_LETTER})\u00ad\n[ \t]*(?={_LETTER})|\u00ad")
_DIVIDED = re.compile(rf"(?<={_LETTER})[-\u2010]\n[ \t]*(?={_LETTER})")
"""A hyphen at the end of a line, between two letters. U+2010 is the hyphen of manual pages."""
_LONGEST_HALF = 60
"""Most characters of half a word."""
CONJUNCTIONS = frozenset("and or und oder bzw sowie ou y e o u".split())
"""Words before which a hyphen stands for the second half of a word: "Haupt- und Nebensatz". They are hardly ever the second
half of a divided word."""
_SHORT_WORDS = frozenset("to of nor bis als et en".split())
"""Words of the same use that are often the second half of a divided word: "low- to high-income", but "pho-to"."""


def words_of(text: str) -> Counter[str]:
    """How often each word is in a text; a word with a hyphen is one word."""
    return Counter(found[0] for found in _WORD.finditer(text))


def hyphen(head: str, tail: str, words: Counter[str]) -> str:
    """The text between the halves of a divided word: "-" if the hyphen is part of the word, else "".

    If the document also has the word without a hyphen, the hyphen is not part of the word. Otherwise, the hyphen is part of the
    word if the document also has the word with a hyphen, or if the second half begins with a capital letter or a conjunction. A
    space follows a hyphen before a conjunction alone, such as in "Haupt- und Nebensatz". A half of digits, such as that of
    "COVID-19", is no part of a divided word.

    >>> hyphen("opera", "tor", words_of("The operator.")), hyphen("well", "known", words_of("A well-known operator."))
    ('', '-')
    >>> hyphen("two", "and", words_of("")), hyphen("black", "and-white", words_of("")), hyphen("COVID", "19", words_of("COVID"))
    ('- ', '-', '-')
    """
    if head.isdigit() or tail.isdigit():
        return "-"
    if _is_whole(head, tail, words):
        return ""
    if _has(f"{head}-{tail}", words) or tail[:1].isupper():
        return "-"
    if tail in CONJUNCTIONS:
        return "- "
    return "-" if _ends(head, tail)[1] in CONJUNCTIONS else ""


def halves(before: str, after: str) -> tuple[str, str]:
    """The letters and hyphens, or the digits, before and after the hyphen at the end of a line; "" if there are none."""
    # The pattern is the same in both directions, and a match from the end takes linear time.
    head = _HALF.match(before.replace("\u2010", "-")[::-1])
    tail = _HALF.match(after.replace("\u2010", "-"))
    return head[0][::-1] if head else "", tail[0] if tail else ""


def _has(word: str, words: Counter[str]) -> bool:
    return bool(words[word] or words[word.lower()])


def _is_whole(head: str, tail: str, words: Counter[str]) -> bool:
    """Whether the document has the word without a hyphen. Halves with hyphens of their own can divide one part of a word."""
    if _has(head + tail, words):
        return True
    return not _has(f"{head}-{tail}", words) and _has("".join(_ends(head, tail)), words)


def _ends(head: str, tail: str) -> tuple[str, str]:
    """The letters directly before and after the hyphen at the line end."""
    return head.rpartition("-")[2], tail.partition("-")[0]


def with_whole_words(text: str) -> str:
    """The text without line ends in words, and without soft hyphens.

    Many programs that fill lines divide no words, but end lines at hyphens. So "-" is also part of a word if the text has both
    halves as words, or if it is part of most of the divided words that the text also has elsewhere.

    >>> with_whole_words("The opera-\\n  tor asks the harbour-\\nmaster. The harbour has one master.")
    'The operator asks the harbour-master. The harbour has one master.'
    """
    text = _SOFT.sub("", text)
    divided = list(_DIVIDED.finditer(text))
    if not divided:
        return text
    pairs = [_halves(text, *found.span()) for found in divided]
    words = words_of(text.replace("\u2010", "-"))
    words.subtract(half for pair in pairs for half in pair)
    words = +words
    whole = sum(_is_whole(*pair, words) for pair in pairs)
    divides_words = whole >= sum(_has("-".join(pair), words) for pair in pairs)
    parts, end = [], 0
    for found, (head, tail) in zip(divided, pairs, strict=True):
        parts += [text[end : found.start()], _between(found[0][0], head, tail, words, divides_words)]
        end = found.end()
    return "".join([*parts, text[end:]])


def _between(sign: str, head: str, tail: str, words: Counter[str], divides_words: bool) -> str:
    """The text in place of the line end after the hyphen `sign`."""
    between = hyphen(head, tail, words)
    if between or sign != "-" or _is_whole(head, tail, words):
        return between
    if not divides_words or all(words[end] for end in _ends(head, tail)):
        return "- " if tail in _SHORT_WORDS else "-"
    return ""


def _halves(text: str, start: int, end: int) -> tuple[str, str]:
    """The letters and hyphens before `start` and those after `end`."""
    return halves(text[max(0, start - _LONGEST_HALF) : start], text[end : end + _LONGEST_HALF])
