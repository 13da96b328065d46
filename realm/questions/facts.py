"""Rules that find their answer themselves: nationality, profession, years, counts, families, measures, borders, other names.

T is the topic.
"""

import re
from collections.abc import Iterator

from realm.questions.clauses import ask
from realm.questions.lines import Line
from realm.questions.names import Known, who_or_what
from realm.questions.rules import AFTER_ANSWER, Draft, Said
from realm.questions.topics import MAKING, NO_TRADE, TRADE, Topic
from realm.questions.verbs import BE
from realm.questions.words import LINKS, PREPOSITIONS

IDENTITY_SHARE = 0.5
"""Share of people for whom this question is made. Nearly every biography begins with a nationality and a profession."""
_RELEASED = frozenset("film album song game".split())
_WORK = re.compile(
    r" (?:(?:influential|prominent|leading|prolific|famous|noted|major|former|early|renowned|professional) )*"
    r"(?P<noun>[a-z-]+(?: [a-z-]+){0,2}?)(?= and|,|\.| who| of| in| from| at| known| best| whose|$)"
)


def identity(said: Said) -> Iterator[Draft]:
    """ "T was a German theoretical physicist" -> what nationality was T, or what did T do for a living?"""
    text, verb, name = said.line.text, said.clause.verb, said.topic.name
    article = re.compile(r"an? (?:ancient )?").match(text, said.clause.start)
    if not said.topic.person or verb not in ("is", "was") or not article or not said.clause.own:
        return
    nation = next((s for s in said.line.spans if s.start == article.end() and s.label == "NORP"), None)
    work = _WORK.match(text, nation.end) if nation else None
    if not nation or not work or said.generator.random() > IDENTITY_SHARE:
        return
    noun = work["noun"].split()[-1]
    if TRADE.fullmatch(noun) and noun not in NO_TRADE and said.generator.random() < 0.5:
        do = {"is": "does", "was": "did"}[verb]
        wordings = (f"what {do} {name} do for a living", f"what {verb} the profession of {name}")
        yield Draft(said.generator.choice(wordings), *work.span("noun"))
    else:
        wordings = (f"what nationality {verb} {name}", f"what {verb} the nationality of {name}")
        yield Draft(said.generator.choice(wordings), nation.start, nation.end)


def year(said: Said) -> Iterator[Draft]:
    """ "T is a 1968 film" -> when was T released?"""
    match = re.compile(r"an? (?P<year>\d{4}) ").match(said.line.text, said.clause.start)
    kind, name = said.topic.kind, said.topic.name
    if match and said.clause.verb in BE and kind in MAKING:
        wording = f"when was {name} released" if kind in _RELEASED else f"what year is the {kind} {name} from"
        yield Draft(wording, *match.span("year"))


_ROUGHLY = (
    r"(?:(?:about|around|approximately|roughly|nearly|almost|over|some|an estimated|more than|at least) )?"
)
_NUMBER = r"\d[\d,.]*(?<![,.])(?: million| billion| thousand)?"
_COUNT = re.compile(
    r"(?:(?P<into>divided into|subdivided into|organized into|organised into|composed of|made up of|of|into) )?"
    rf"{_ROUGHLY}(?P<count>{_NUMBER}|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve)"
    r" (?P<noun>[a-z-]+(?: [a-z-]+){0,2}?s)(?=[,.;]| (?:in|on|and|with|across|that|which|as|for|of|to|from|by|or|at|into"
    r"|within|called)\b|$)"
)
_COUNTING = frozenset("has have had contains contain comprises comprise consists consist won wrote".split())
_NO_COUNT = frozenset("years times parts types is was has".split())


def count(said: Said) -> Iterator[Draft]:
    """ "T has ANSWER provinces" -> how many provinces does T have?"""
    clause = said.clause
    match = _COUNT.match(said.line.text, clause.start)
    if not match or not (clause.verb in _COUNTING or (clause.verb in BE and match["into"])):
        return
    words = match["noun"].split()
    if not set(words) & (PREPOSITIONS | LINKS) and words[-1] not in _NO_COUNT:
        wording = ask(f"how many {match['noun']}", clause, said.topic, match["into"] or "")
        yield Draft(wording, *match.span("count"))


_TAXON = re.compile(
    r"(?:in|of|within|to) the (?:[a-z-]+ )?(?P<rank>(?:sub|super)?family|genus|(?:sub|infra)?order|class|phylum|tribe)"
    r" (?P<taxon>[A-Z][a-z]+)(?=[,.;]| (?:and|in|of|that|which|native|found)\b|$)"
)


def taxon(said: Said) -> Iterator[Draft]:
    """ "T is a plant in the family ANSWER" -> which family does T belong to?"""
    clause = said.clause
    match = _TAXON.search(said.line.text, clause.start, clause.end)
    if match and clause.own and clause.verb in ("is", "are", "belongs", "belong"):
        do = "do" if clause.verb in ("are", "belong") else "does"
        yield Draft(f"which {match['rank']} {do} {said.topic.name} belong to", *match.span("taxon"))


_AREA = r"km2|km²|sq mi|square (?:kilomet(?:re|er)s|miles)"
_LENGTH = r"kilomet(?:re|er)s|km|met(?:re|er)s|m|feet|ft|miles|mi"
_MEASURE = re.compile(
    r"(?P<measure>(?:(?:total|average|mean|maximum|surface|land|urban|metropolitan) )*(?:population density|population"
    r"|(?P<area>area)|(?P<length>length|height|elevation|depth|diameter|radius|altitude|width|wingspan)|mass|volume"
    r"|orbital period|atomic number))"
    rf" (?:of |is |was )?{_ROUGHLY}(?P<amount>{_NUMBER}(?: ?(?P<unit>{_AREA}|{_LENGTH}|kg|tonnes|days|years|people"
    r"|inhabitants)\b)?)(?![\w%]|[.,–]\d| ?×)"
)


def measures(line: Line, topic: Topic) -> Iterator[Draft]:
    """ "with a population of ANSWER" -> what is the population of T?"""
    for match in _MEASURE.finditer(line.text):
        if topic.person or re.search(r"\b(?:which|whose|where|who|than|after)\b", line.text[: match.start()]):
            return
        units = _AREA if match["area"] else _LENGTH if match["length"] else ""
        if units and not re.fullmatch(
            units, match["unit"] or ""
        ):  # "a metropolitan area of 12.9 million people"
            continue
        following = re.match(r" ([a-z]+)", line.text[match.end() :])
        if not following or following[1] in AFTER_ANSWER:
            yield Draft(f"what is the {match['measure']} of {topic.name}", *match.span("amount"))


_DIRECTION = re.compile(
    r" (?:to|on|in) (?P<direction>the (?:(?:north|south)-?(?:east|west)?|east|west))(?=[,.;]| and (?:[A-Z]|at |the [A-Z]))"
)


def borders(line: Line, topic: Topic, known: Known) -> Iterator[Draft]:
    """ "T borders ANSWER to the north, ..." -> which country borders T to the north?"""
    verb = re.search(r"\bborder(?:s|ed by)\b", line.text)
    for span in line.spans if verb else []:
        toward = _DIRECTION.match(line.text, span.end)
        shared = re.search(r"[A-Z][\w’'-]*(?: and [^,]*|,(?: and)? (?:the )?)$", line.text[: span.start])
        if verb and verb.end() < span.start and toward and not shared:
            wh = who_or_what(line.text[span.start : span.end], span.label, known)
            if wh and wh != "who":
                yield Draft(f"{wh} borders {topic.name} to {toward['direction']}", span.start, span.end)


_ALIAS = re.compile(
    r"(?:, |\b(?:is|was|are|were) )(?P<how>(?:also|better|commonly|popularly|often|sometimes|formerly|originally|previously"
    r"|once|colloquially|historically) (?:(?:known|referred to) as|called|named)) (?:the |simply |an? )?[\"“]?"
    r"(?!(?:after|among|as|by|for|in|one) )(?P<alias>\w[\w .'’-]{1,40}?)"
    r"(?=[\"”]?(?:[,;.]|$| (?:is|was|and|or|in|by|for|to|from|because)\b))"
)

_SHARED_NOUN = re.compile(r" the [\w'’-]+ (?:or|and) [A-Z][\w'’-]* \w")
"""The start of "the Lower or Nizhnyaya Angara", where the noun of the first name follows the second name."""


def alias(line: Line, topic: Topic, verb: str) -> Iterator[Draft]:
    """ "T, also known as ANSWER," -> what is T also known as?"""
    match = _ALIAS.search(line.text)
    if match and _SHARED_NOUN.match(line.text, match.end("how")):
        return
    if match and not re.search(r"\b(?:which|whose|where|who|that|of)\b", line.text[: match.start()]):
        be = "was" if topic.person else "are" if topic.possessive == "their" else verb if verb in BE else "is"
        yield Draft(f"what {be} {topic.name} {match['how']}", *match.span("alias"))
