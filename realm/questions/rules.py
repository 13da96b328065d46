"""What the rules are given, what they give, and when a span can be an answer at all."""

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
    """A question, and its answer's characters in the line."""

    question: str
    start: int
    end: int


class Said(NamedTuple):
    """A clause with all that a rule may ask about."""

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
        """What follows in the clause, if it is short and plain enough to stay in the question."""
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
    """Whether the span is all of its noun phrase, and no item of a list, which would be half an answer."""
    answer, after = line.text[span.start : span.end], line.text[span.end :]
    following = re.match(r" ([\w-]+)", after)
    if following and (following[1] not in AFTER_ANSWER or (following[1] == "of" and span.label != "DATE")):
        return False
    if answer.lower() in _VAGUE or _LIST_AFTER.match(after) or _LIST_BEFORE.search(line.text[: span.start]):
        return False
    # "Ulm, Germany" is no list, "Ulm, Bonn and Rome" is one
    if re.match(r", (?:the )?(?:[a-z]+ )?[A-Z]", after):
        listed = re.match(r", [\w’'. -]+,? (?:and|or) |, [\w’'. -]+, [A-Z]", after)
        return span.label in ("GPE", "LOC") and not listed
    return True


_EMBEDS = re.compile(
    r"\b(?:who|which|that|where|when|whose|whom|after|before|while|until|because|if|as|including|called|named|known"
    r"|titled|being|having|making|than|between|both|either|and the|and an?|but)\b|[;:]| by "
)


def is_simple(text: str) -> bool:
    """Whether what stands between verb and answer is one phrase, so that the answer belongs to the verb."""
    words = text.split()
    bound = ADVERBS | {"and", "been"}
    hanging = any(w in PARTICIPLES and words[n] not in bound for n, w in enumerate(words[1:]))
    return not hanging and not _EMBEDS.search(text) and "," not in text.rstrip(" ,")


ENDS_IN_VERB = re.compile(r"\b(?!king|building|painting|spring|wing|ring|ruling)[a-z]+ing$")
