"""Finds the topic of a document: its name in a question, its kind, and whether it is a person."""

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from realm.questions.lines import line_of
from realm.questions.verbs import PARTICIPLES
from realm.questions.words import LINKS, PREPOSITIONS, content_words
from realm.text.corpus import Passage, shorter_titles


class Topic(NamedTuple):
    """The subject of a document."""

    bare: str
    """The title, from which a remark in brackets at the end and a number at the start are removed: "Psycho" for "Psycho (1960
    film)". So is the name of a site, if the first sentence defines the rest: "Psycho" for "Psycho - Wikipedia"."""
    name: str
    """The name in a question, with its article: "the Zagros Mountains", "a hat"."""
    kind: str
    """The last word of the noun phrase in "is a ...", such as "city" or "film"; "" if it is not found."""
    person: bool
    possessive: str
    """its, his, her or their."""
    starts: re.Pattern[str]
    """Pattern of the start of a sentence about the topic."""


_PRONOUNS = {"it": "its", "he": "his", "she": "her", "they": "their"}
_DEFINITION = re.compile(
    r"\b(?P<verb>is|are|was|were) (?:one of )?(?:(?P<article>the|an?|any) )?(?P<phrase>[^,.;:()]*)"
)
_DEFINED = re.compile(r",| \(| (?:is|are|was|were)\b")
"""What comes after a name in a sentence that defines it."""
_NUMBER = re.compile(r"^(?:(?:Appendix|Section|Part|Section) [\dA-Z]+[.:]|[\dA-Z]+\.\d)[\d.]* +(?=\S)")
"""The number of a chapter or section at the start of a title: "Section 1. ", "A.13. "."""
_FULL_NAME = re.compile(
    r"(?:The |An? )?((?:[\w.'’-]+ ){0,7}?[\w.'’-]+)(?=,|,? (?:is|was|are|were|also|known)\b)"
)
TRADE = re.compile(
    r"[a-z-]*(?:er|or|ist|ian|eer|ess|man|woman|poet|monk|saint|architect|critic|chef|scholar|astronaut|pilot|admiral"
    r"|diplomat|spy|nurse|athlete|mystic|chemist|activist|playwright|aviator)"
)
NO_TRADE = frozenset(
    "member founder leader ruler emperor river father mother daughter sister brother order number owner".split()
)
_PERSON = re.compile(
    r"(?:abbot|apostle|ascetic|attorney|ballerina|baritone|bishop|cacique|caliph|chief|child|cleric|client|consort|daughter"
    r"|deacon|deity|deitie|descendant|detective|disciple|entrepreneur|figure|friar|general|girl|god|goddesse|gymnast|head|hero"
    r"|host|intellectual|khan|king|knight|lord|magistrate|magnate|marshal|martyr|merchant|monarch|nun|official|oligarch"
    r"|patriarch|personality|pharaoh|physicist|pirate|polymath|pope|prelate|president|priest|prince|prodigy|prophet"
    r"|psychoanalyst|quarterback|queen|revolutionary|rishi|samurai|shah|son|soprano|sovereign|sultan|superhero|tsar|wife"
    r"|first|second|third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|last|best|active|famous|jazz|legendary"
    r"|middle-distance|political|regarded|religious|renowned|spiritual|track|well-known)s?"
)
"""Kinds of people that `TRADE` does not have, and words that end the phrase in "is the third of", "is best known for", "is a
jazz and swing singer"."""
MAKING = {
    kind: verb
    for verb, kinds in {
        "composed": "opera ballet symphony oratorio concerto sonata",
        "created": "series franchise",
        "developed": "game",
        "directed": "film",
        "made": "sculpture statue",
        "painted": "painting fresco",
        "recorded": "song album",
        "wrote": "novel book play poem novella tragedy comedy treatise manga story essay musical",
    }.items()
    for kind in kinds.split()
}
"""Kind of a work -> the verb for making a work of this kind."""


def topic_of(passages: Sequence[Passage]) -> Topic:
    """The topic of a document with these passages. The first sentence of the first passage should define the topic."""
    first = passages[0]
    text = " ".join(passage.text for passage in passages)
    opening = line_of(first, *(first.sentences[0] if first.sentences else (0, len(first.text)))).text

    definition = _DEFINITION.search(opening)
    phrase = _noun_phrase(definition["phrase"]) if definition else []
    kind = phrase[-1] if definition and definition["article"] and phrase and phrase[-1].islower() else ""
    bare = _bare(first.title)
    exact = _at_start(bare, opening)
    for name in map(_bare, shorter_titles(first.title)):
        if not exact and (short := _at_start(name, opening)) and _DEFINED.match(opening, short.end()):
            bare, exact = name, short
    plural = bool(definition and exact and definition["verb"] in ("are", "were"))

    counts = {p: len(re.findall(rf"\b(?:{p}|{_PRONOUNS[p]})\b", text, re.IGNORECASE)) for p in _PRONOUNS}
    pronoun = max(counts, key=lambda p: counts[p])
    person = pronoun in ("he", "she") and counts[pronoun] > 0 and not plural and kind not in MAKING
    # An article about "the Great Purge" has many pronouns of people.
    person = person and not (exact and exact[1])
    tagged = any(span.label == "PERSON" and span.start < 9 for span in first.spans)
    # An article about a genus has the pronouns of its discoverer.
    person = person and (not kind or tagged or bool(TRADE.fullmatch(kind) or _PERSON.fullmatch(kind)))
    if not any(counts.values()) and TRADE.fullmatch(kind):
        person, pronoun = tagged, "he"
    if not person:
        pronoun = "they" if plural else "it"

    name = bare
    if exact and not person:
        name = f"{exact[1].lower()} {exact[2]}" if exact[1] else exact[2]
    elif not person and re.search(rf"\bthe {re.escape(bare)}\b(?! [A-Z])", text):
        name = f"the {bare}"
    starts = [re.escape(bare) + "(?:e?s)?", pronoun]
    full = _FULL_NAME.match(opening)  # "James Abbott McNeill Whistler was", "Italian is"
    if full and content_words(full[1]) & content_words(bare):
        starts.insert(0, re.escape(full[1]))
    if person and " " in bare:
        starts.append(re.escape(bare.split()[-1]))
    elif kind and not plural:
        starts += [f"the {re.escape(' '.join(phrase[-2:]))}", f"the {re.escape(kind)}"]
    begins = re.compile(rf"(?:(?:The|An?) )?(?:{'|'.join(starts)})(?![\w'’-])", re.IGNORECASE)
    return Topic(bare, name, kind, person, _PRONOUNS[pronoun], begins)


def _bare(title: str) -> str:
    return re.sub(r" \([^)]*\)$", "", _NUMBER.sub("", title)).strip()


def _at_start(name: str, text: str) -> re.Match[str] | None:
    """The name at the start of a text, after an article (group 1)."""
    return re.match(rf"(?:(the|an?) )?({re.escape(name)}(?:e?s)?)(?!\w)", text, re.IGNORECASE)


def _noun_phrase(text: str) -> list[str]:
    """The words before the first word that cannot belong to a simple noun phrase."""
    words: list[str] = []
    for word, following in pairwise([*text.split(), ""]):
        leads_on = following in PREPOSITIONS or following.endswith("ly")
        hangs = words and leads_on and (word in PARTICIPLES or word.endswith("ing"))
        if hangs or word in PREPOSITIONS | LINKS or (word.endswith("ly") and following in PARTICIPLES):
            break
        words.append(word)
    return words
