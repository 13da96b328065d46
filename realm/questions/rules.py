"""Input (`Said`) and output (`Draft`) of the rules that make questions, and tests of whether a span can be an answer."""

import random
import re
from typing import NamedTuple

from realm.questions.clauses import Clause
from realm.questions.lines import Line
from realm.questions.names import Known
from realm.questions.topics import Topic
from realm.questions.verbs import BE, PARTICIPLES
from realm.questions.words import ADVERBS, LINKS, PREPOSITIONS
from realm.text.corpus import Span


class Draft(NamedTuple):
    """A question, and the characters [start, end) of its answer in the line."""

    question: str
    start: int
    end: int


class Said(NamedTuple):
    """A clause, and all that a rule needs to make a question from the clause."""

    line: Line
    topic: Topic
    clause: Clause
    known: Known
    generator: random.Random

    def answer(self, span: Span) -> str:
        return self.line.text[span.start : span.end]

    def before(self, span: Span) -> str:
        return self.line.text[self.clause.start : span.start]

    def after(self, span: Span) -> str:
        """The text of the clause after the span, if it is short and simple enough to be part of the question; else ""."""
        after = self.line.text[span.end : self.clause.end]
        plain = re.fullmatch(r" (?:in|on|at|for|by|as|to|from|with|against|during) [\w' -]+", after)
        return after if plain and len(after.split()) <= 6 else ""

    def is_passive(self, rest: str) -> bool:
        return self.clause.verb in BE and rest.split(" ")[0] in PARTICIPLES


AFTER_ANSWER = (
    PREPOSITIONS | LINKS | ADVERBS | frozenset("because if so alongside including following".split())
)
_VAGUE = frozenset(
    "west east north south earth world universe western eastern sun moon god christian".split()
)
_WORDS_BETWEEN = r"(?:[a-z]+(?<!ing)(?<!ed) )"
_LIST_AFTER = re.compile(
    rf",? (?:and|or|to|until|as well as) {_WORDS_BETWEEN}{{0,3}}[A-Z\d]|,? and\b.*\bby\b|['’\w&/–—-]"
)
_LIST_BEFORE = re.compile(
    rf"[A-Z\d][\w’'.-]*(?: [a-z]+)?,? (?:and|or|&|to|–) (?:the )?{_WORDS_BETWEEN}?$|, $"
)


def is_whole(line: Line, span: Span) -> bool:
    """Whether the span is a complete noun phrase and not an item of a list. A part of a phrase or list is not a full answer."""
    answer, after = line.text[span.start : span.end], line.text[span.end :]
    following = re.match(r" ([\w-]+)", after)
    if following and (following[1] not in AFTER_ANSWER or (following[1] == "of" and span.label != "DATE")):
        return False
    if answer.lower() in _VAGUE or _LIST_AFTER.match(after) or _LIST_BEFORE.search(line.text[: span.start]):
        return False
    # "Ulm, Germany" is not a list, but "Ulm, Bonn and Rome" is.
    if re.match(r", (?:the )?(?:[a-z]+ )?[A-Z]", after):
        listed = re.match(r", [\w’'. -]+,? (?:and|or) |, [\w’'. -]+, [A-Z]", after)
        return span.label in ("GPE", "LOC") and not listed
    return True


_EMBEDS = re.compile(
    r"\b(?:who|which|that|where|when|whose|whom|after|before|while|until|because|if|as|including|called|named|known"
    r"|titled|being|having|making|than|between|both|either|and the|and an?|but)\b|[;:]| by "
)


def is_simple(text: str) -> bool:
    """Whether the text between verb and answer is a single phrase, so that the answer belongs to the verb."""
    words = text.split()
    bound = ADVERBS | {"and", "been"}
    hanging = any(w in PARTICIPLES and words[n] not in bound for n, w in enumerate(words[1:]))
    return not hanging and not _EMBEDS.search(text) and "," not in text.rstrip(" ,")


ENDS_IN_VERB = re.compile(r"\b(?!king|building|painting|spring|wing|ring|ruling)[a-z]+ing$")
