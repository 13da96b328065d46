"""Rules for sentences whose subject is not the topic T, and for the remark in brackets after the name of a person."""

import re
from collections.abc import Iterator

from realm.questions.clauses import clause_at
from realm.questions.lines import Line
from realm.questions.names import PLACES, Known, who_or_what
from realm.questions.rules import Draft, is_whole
from realm.questions.topics import Topic
from realm.questions.words import LINKS, PREPOSITIONS, content_words


def subject(line: Line, topic: Topic, known: Known) -> Iterator[Draft]:
    """ "ANSWER painted T in 1937" -> who painted T in 1937?"""
    at = 4 if line.text.startswith("The ") else 0
    span = next((span for span in line.spans if span.start == at), None)
    clause = clause_at(line.text, span.end) if span and line.text[span.end : span.end + 1] == " " else None
    if not span or not clause or clause.verb in ("is", "are"):
        return
    rest = line.text[clause.start : clause.end]
    wh = who_or_what(line.text[span.start : span.end], span.label, known)
    if wh and wh != "what" and re.search(rf"\b{re.escape(topic.bare)}\b", rest, re.IGNORECASE):
        yield Draft(f"{wh} {clause.verb} {rest}", span.start, span.end)


_ATTRIBUTE = re.compile(
    r"(?:(?P<whose>Its|His|Her|Their)|The) (?P<noun>[\w-]+(?: [\w-]+){0,4}?) (?P<verb>is|was|are|were) (?:the )?(?:city of )?"
)
_THINGS = frozenset(
    "airport bridge building capital coast coastline hill inlet language peak place point port range reservoir settlement"
    " street summit tributary volcano waterfall".split()
)
_SUPERLATIVE = re.compile(r"(?:capital|current|first|last|main|most|official|[a-z]+est)\b")


def attribute(line: Line, topic: Topic, known: Known) -> Iterator[Draft]:
    """ "Its capital is ANSWER" -> what is the capital of T?"""
    match = _ATTRIBUTE.match(line.text)
    span = next((span for span in line.spans if match and span.start == match.end()), None)
    if not match or not span or span.label == "NORP" or not is_whole(line, span):
        return
    noun, whose = match["noun"], match["whose"]
    ours = (
        whose.lower() == topic.possessive
        if whose
        else _SUPERLATIVE.match(noun) and not set(noun.split()) & PREPOSITIONS
    )
    wh = who_or_what(line.text[span.start : span.end], span.label, known)
    if (
        ours
        and wh
        and not set(noun.split()) & (LINKS - {"and"})
        and not content_words(noun) & content_words(topic.bare)
    ):
        # Taggers take names such as "Mount Dena" and "São Paulo" for people.
        wh = "who" if wh == "who" and not set(noun.split()) & (PLACES | _THINGS) else "what"
        yield Draft(f"{wh} {match['verb']} the {noun} of {topic.name}", span.start, span.end)


_DAY = r"(?:\d{1,2} [A-Z][a-z]+ \d{3,4}|[A-Z][a-z]+ \d{1,2}, \d{4}|\d{3,4})(?: (?:BCE?|AD|CE))?"
_LIFE = re.compile(
    rf"(?:^|[;,] |(?P<only>\bborn )|c\. )(?P<born>{_DAY})(?: ?[–-] ?(?:c\. )?(?P<died>{_DAY}))?$"
)


def lifetime(text: str, start: int, end: int, topic: Topic) -> Iterator[Draft]:
    """ "T (26 July 1928 – 7 March 1999)" -> when was T born, when did T die? Offsets count characters of the passage."""
    bracket = re.compile(r"(?P<name>[^.(]{1,80})\((?P<inside>[^()]*)\)").match(text, start, end)
    if not bracket or not topic.person or re.search(r" (?:is|was) ", bracket["name"]):
        return
    life = _LIFE.search(bracket["inside"])
    if life and (life["died"] or life["only"]):
        at = bracket.start("inside")
        yield Draft(f"when was {topic.name} born", at + life.start("born"), at + life.end("born"))
        if life["died"]:
            yield Draft(f"when did {topic.name} die", at + life.start("died"), at + life.end("died"))
