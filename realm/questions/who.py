"""Rules that make questions about people and things. The answer to such a question is a salient span. T is the topic."""

import re

from realm.questions.clauses import ask
from realm.questions.names import who_or_what
from realm.questions.rules import ENDS_IN_VERB, Said, is_simple
from realm.questions.topics import MAKING
from realm.questions.verbs import BE, PARTICIPLES, PAST
from realm.questions.words import LINKS, PREPOSITIONS
from realm.text.corpus import Span

_BY = re.compile(r"(?P<verb>[a-z]+) (?P<stuff>.*?)\bby (?:the |an? )?(?P<title>(?:[\w-]+ ){0,5})$")
_NO_DEED = frozenset(
    "consider regard know see call describe depict follow surround border give mean refer".split()
)


def who_did(said: Said, span: Span) -> str | None:
    """ "T was painted by ANSWER" -> who painted T?"""
    match = _BY.match(said.before(span))
    if not match or not said.is_passive(said.before(span)) or not is_simple(match["stuff"]):
        return None
    if set(match["title"].split()) & (PREPOSITIONS | LINKS):
        return None
    if said.clause.own and said.clause.verb in ("is", "are"):  # "is governed by" is not a single action
        return None
    base = PARTICIPLES[match["verb"]]
    who = who_or_what(said.answer(span), span.label, said.known)
    if who == "what" and span.label == "ORG":
        who = "who"
    if not who or who == "what" or base in _NO_DEED or base not in PAST:
        return None
    return f"{who} {PAST[base]} {said.topic.name} {match['stuff']} {said.after(span)}"


def who_made(said: Said, span: Span) -> str | None:
    """ "T is a novel by ANSWER" -> who wrote T?"""
    match = re.match(
        r"(?:an?|the) (?P<noun>[^,.;]*?) by (?:the )?(?P<title>(?:[\w-]+ ){0,5})$", said.before(span)
    )
    kind = match["noun"].split()[-1] if match and match["noun"] else ""
    if said.clause.verb not in BE or kind not in MAKING or kind != said.topic.kind:
        return None
    return f"who {MAKING[kind]} {said.topic.name}" if span.label in ("PERSON", "ORG") else None


_STRANDED = re.compile(
    r"(?:^|(?<= ))(?P<preposition>in|to|with|from|for|under|against|after|of|into|through|at|during) (?:the |an? )?$"
)
_KIN = "son|daughter|wife|husband|brother|sister|mother|father|disciple|pupil|student|grandson|nephew|niece|cousin"
_ENDS_IN_KIN = re.compile(rf"\b(?:{_KIN})$")
_RELATION = re.compile(
    rf"an? (?:[\w-]+ ){{0,2}}(?:{_KIN}|member|part|subsidiary|native|province|state|territory|suburb|district|region|moon"
    r"|satellite|branch|follower|descendant|citizen|tributary|department|colony|dialect|division|capital|contemporary"
    r"|friend|founder|co-founder|ruler|king|queen)$"
)
_PREDICATE = re.compile(
    r"(?:part|home|king|queen|president|emperor|native|close|adjacent|heir|married|the \w+|famous|best known|member)\b"
)
_LISTING = frozenset(
    "include comprise contain feature have become border encompass mean remain cover star see share".split()
)


def what_for(said: Said, span: Span) -> str | None:
    """ "T is named after ANSWER" -> who is T named after? The preposition stays at the end of the question."""
    match, clause = _STRANDED.search(said.before(span)), said.clause
    if not match or span.label in ("DATE", "NORP"):
        return None
    stem, preposition = said.before(span)[: match.start()].rstrip(" ,"), match["preposition"]
    others = set(stem.split()) & (PREPOSITIONS - {"of"})
    if not stem or others or not is_simple(stem) or len(stem.split()) > 7 or stem.startswith("born"):
        return None
    passive = said.is_passive(stem)
    if clause.verb in BE and not passive:
        nested = preposition == "of" and " of " in f" {stem} "
        relation = preposition == "of" and _RELATION.match(stem)
        if (
            preposition == "in"
            or nested
            or ENDS_IN_VERB.search(stem)
            or not (relation or _PREDICATE.match(stem))
        ):
            return None
    elif clause.form and clause.form.base in _LISTING - {"become"}:
        return None
    wh = who_or_what(said.answer(span), span.label, said.known)
    if preposition == "of" and _ENDS_IN_KIN.search(stem):
        wh = "who"
    if not wh or (wh == "what" and preposition in ("after", "during", "in", "at") and not passive):
        return None
    return ask(wh, clause, said.topic, f"{stem} {preposition}")


def direct_object(said: Said, span: Span) -> str | None:
    """ "T married ANSWER" -> who did T marry?"""
    form = said.clause.form
    wh = who_or_what(said.answer(span), span.label, said.known)
    if (
        said.before(span) not in ("", "the ")
        or form is None
        or form.base in _LISTING
        or span.label == "NORP"
        or not wh
    ):
        return None
    return ask(wh, said.clause, said.topic, said.after(span))
