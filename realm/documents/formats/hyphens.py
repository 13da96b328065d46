"""Words that are divided at the end of a line become whole again."""

import re
from collections import Counter

_LETTER = r"[^\W\d_]"
_WORD = re.compile(rf"{_LETTER}+(?:-{_LETTER}+)*")
_SOFT = re.compile(rf"(?<={_LETTER})\u00ad\n[ \t]*(?={_LETTER})|\u00ad")
_DIVIDED = re.compile(rf"(?<={_LETTER})[-\u2010]\n[ \t]*(?={_LETTER})")
"""A hyphen at the end of a line, between two letters. U+2010 is the hyphen of manual pages."""
_HEAD, _TAIL = re.compile(rf"{_LETTER}+\Z"), re.compile(rf"{_LETTER}+")
_LONGEST_HALF = 60
"""Most letters of half a word."""


def words_of(text: str) -> Counter[str]:
    """How often each word is in a text; a word with a hyphen is one word."""
    return Counter(found[0] for found in _WORD.finditer(text))


def hyphen(head: str, tail: str, words: Counter[str]) -> str:
    """The text between the halves of a divided word: "-" if the hyphen is part of the word, else "".

    If the document also has the word without a hyphen, the hyphen is not part of the word. Otherwise, the hyphen is part of the
    word if the document also has the word with a hyphen, or if the second half begins with a capital letter.

    >>> hyphen("opera", "tor", words_of("The operator.")), hyphen("well", "known", words_of("A well-known operator."))
    ('', '-')
    """
    if _is_whole(head, tail, words):
        return ""
    return "-" if words[f"{head}-{tail}"] or tail[:1].isupper() else ""


def _is_whole(head: str, tail: str, words: Counter[str]) -> bool:
    return bool(words[head + tail] or words[(head + tail).lower()])


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
    halves = [_halves(text, *found.span()) for found in divided]
    words = words_of(text.replace("\u2010", "-"))
    words.subtract(half for pair in halves for half in pair)
    words = +words
    whole = sum(_is_whole(*pair, words) for pair in halves)
    divides_words = whole >= sum(words["-".join(pair)] > 0 for pair in halves)
    parts, end = [], 0
    for found, (head, tail) in zip(divided, halves, strict=True):
        mark = hyphen(head, tail, words)
        if found[0][0] == "-" and not _is_whole(head, tail, words):
            mark = mark if divides_words and not (words[head] and words[tail]) else "-"
        parts += [text[end : found.start()], mark]
        end = found.end()
    return "".join([*parts, text[end:]])


def _halves(text: str, start: int, end: int) -> tuple[str, str]:
    """The letters before `start` and those after `end`."""
    head, tail = _HEAD.search(text[max(0, start - _LONGEST_HALF) : start]), _TAIL.match(text, end)
    return head[0] if head else "", tail[0][:_LONGEST_HALF] if tail else ""
