"""Rules that make questions about times and places. The answer to such a question is a salient span. T is the topic."""

import re

from realm.questions.clauses import ask
from realm.questions.names import PLACES
from realm.questions.rules import ENDS_IN_VERB, Said, is_simple
from realm.questions.topics import MAKING
from realm.questions.verbs import BE, HAVE, MODALS
from realm.questions.words import PREPOSITIONS, content_words
from realm.text.corpus import Span

_TIME = re.compile(r"(?:^|(?<= ))(?:in|on|during|around|circa) (?:the |about |around )?$")
_OFFICE = re.compile(r"the (?:first|last|capital|president|prime|king|queen|leader)\b")

_REPUTE = re.compile(r"(?:\w+ )?(?:credited|famous|known|noted|remembered) (?:for|with)\b")
"""The start of "best remembered for securing the return of Okinawa in 1972": the time is that of the deed."""


def when(said: Said, span: Span) -> str | None:
    """ "T was founded in ANSWER" -> when was T founded?"""
    clause, match = said.clause, _TIME.search(said.before(span))
    if span.label != "DATE" or not match or clause.verb in ("has", "have"):
        return None
    rest = said.before(span)[: match.start()].rstrip(" ,")
    if not is_simple(rest):
        return None
    if clause.verb in BE:
        state = re.match(r"(?:an?|the|one|among)\b", rest) and not _OFFICE.match(rest)
        # "it was Leonhard Euler in 1752 who derived" is not about a topic in 1752.
        cleft = not said.is_passive(rest) and re.match(r",? (?:who|that)\b", said.line.text[span.end :])
        if not rest or state or cleft or _REPUTE.match(rest):
            return None
        if not clause.own and re.search(r"\d", said.answer(span)):
            clause = clause._replace(verb={"is": "was", "are": "were"}.get(clause.verb, clause.verb))
    if re.match(r"(?:born|died)\b", rest):
        return ask("when", clause, said.topic, rest.split()[0])
    year = re.fullmatch(r"\d{3,4}", said.answer(span))
    wh = said.generator.choice(("when", "when", "in what year")) if year else "when"
    return ask(wh, clause, said.topic, f"{rest} {said.after(span)}")


_PLACE = re.compile(
    r"(?:^|(?<= ))(?P<preposition>in|at|on|near|within|of) (?:the )?"
    rf"(?:(?:[\w.-]+ )?(?P<kind>{'|'.join(sorted(PLACES))}) of )?(?:the )?"
    r"(?:(?:(?:north|south)?-?(?:east|west)?(?:ern)?|central|mainland|continental|modern-day|present-day|modern|ancient"
    r"|upper|lower) )?$"
)
_JOINED = re.compile(r"\b(?:in|at|on|to|from|during) .* and ")
"""A place or time before the answer: "ranked third in Nigeria and fifth in ANSWER" """
_RANK = re.compile(
    r"the (?:\w+ and )?(?:capital|first|last|only|second|third|fourth|fifth|main|major|most|[\w-]+est\b)"
)
_NO_PLACE = frozenset(
    "result culminate specialise specialize believe succeed consist engage participate share include".split()
)


def where(said: Said, span: Span) -> str | None:
    """ "T was born in ANSWER" -> where was T born?; "T is the capital of ANSWER" -> which country is T the capital of?"""
    match = _PLACE.search(said.before(span))
    if (
        not match
        or (span.label not in ("GPE", "LOC", "FAC", "ORG") and not match["kind"])
        or span.label == "DATE"
    ):
        return None
    preposition, kind = match["preposition"], match["kind"] or said.known.kind(said.answer(span))
    if kind == "person" or (span.label == "ORG" and preposition != "at" and kind not in PLACES):
        return None
    kind = kind if kind in PLACES else ""
    stem = said.before(span)[: match.start()].rstrip(" ,")
    if not is_simple(stem) or re.search(r"border|\belsewhere\b", stem):
        return None
    if said.clause.verb in BE and not said.is_passive(stem):
        return _where_is(said, stem, preposition, kind)
    form = said.clause.form
    if (
        preposition == "of"
        or said.clause.verb in MODALS
        or said.clause.verb in HAVE
        or (form and form.base in _NO_PLACE)
    ):
        return None
    first = stem.split(" ")[0]
    rest = f"{stem} {said.after(span)}" if stem else ""
    if first in ("born", "located", "situated", "based", "found"):
        rest = first
    elif _JOINED.search(stem):
        return None
    wh = "where"
    if kind and said.generator.random() < 0.5:
        wh = f"{'on' if preposition == 'on' else 'in'} which {kind}"
    return ask(wh, said.clause, said.topic, rest)


def _where_is(said: Said, stem: str, preposition: str, kind: str) -> str | None:
    others = set(stem.split()) & (PREPOSITIONS - {"of"})
    if said.topic.person or others or len(stem.split()) > 8 or ENDS_IN_VERB.search(stem):
        return None
    if said.topic.kind in MAKING or content_words(stem) & content_words(said.topic.bare):
        return None
    if re.match(r"an? ", stem) and preposition == "in":
        wh, rest = (f"which {kind}", "in") if kind else ("where", "located")
        return ask(wh, said.clause, said.topic, rest)
    if _RANK.match(stem) and kind and preposition in ("in", "of"):
        return ask(f"which {kind}", said.clause, said.topic, f"{stem} {preposition}")
    return None
