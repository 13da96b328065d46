"""Questions made from a corpus by rules, for corpora that nobody has written questions for.

1. `_topic` reads from a document's opening how its subject is called, whether it is a person, and of what kind.
2. `_line` takes a sentence without its brackets, and remembers where every character stood in the passage.
3. `_clauses` finds what is said of the topic: verb and rest. The topic may stand there as a pronoun, a surname or
   "the city"; the question calls it by name, so that it stands on its own.
4. The rules turn a clause around a salient span, a number or a name into a question that this answers.
5. `_is_sound` drops what gives its answer away, points outside itself, or is too short or too long.

There is no parser: sentences and spans come with the passages, grammar is a table of verbs (`verbs.py`) and a few
patterns, and the corpus's own titles say what is a country and who is a person. A sentence that is not understood makes
no question. Questions are in lower case with a question mark, as in WebQuestions. English only.
"""

import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from realm.qa.evaluation import normalise_answer
from realm.qa.verbs import BE, FORMS, HAVE, MODALS, PARTICIPLES, PAST, Form
from realm.text.corpus import Passage, Span

QUESTION_WORDS = (3, 20)
"""Fewest and most words of a question."""
ANSWER_WORDS = 8
SENTENCE_CHARACTERS = 1000
"""A longer sentence is a table or a list."""
OPENING = 120
"""Characters within which a sentence must come to its subject: "After some years in Paris, he"."""
IDENTITY_SHARE = 0.5
"""Of the people whose nationality or profession could be asked: nearly every biography begins with them."""


class MadeQuestion(NamedTuple):
    """A question, and the place that answers it: `passage.text[answer_start:answer_end] == answers[0]`."""

    id: str
    question: str
    answers: tuple[str, ...]
    passage_id: str
    document_id: str
    title: str
    answer_start: int
    answer_end: int


def make_questions(
    passages: Iterable[Passage], seed: int = 0, most_per_document: int = 5
) -> list[MadeQuestion]:
    """Questions by document and place, the same for the same passages and seed.

    Where the rules find more than `most_per_document`, that many are drawn, no two with the same answer or wording. The
    seed also chooses between wordings. A document's first passage should come first: it says what it is about.
    """
    documents: dict[str, list[Passage]] = {}
    for passage in {passage.id: passage for passage in passages}.values():  # one text may be in two documents
        documents.setdefault(passage.document_id, []).append(passage)
    topics = {document: _topic(parts) for document, parts in documents.items()}
    known = _known(topics.values())
    made = []
    for document, parts in documents.items():
        generator = random.Random(f"{seed}/{document}")
        found = [q for part in parts for q in _of_passage(part, topics[document], known, generator)]
        found = list({q.question: q for q in reversed(found)}.values())[::-1]
        drawn = {normalise_answer(q.answers[0]): q.id for q in generator.sample(found, len(found))}
        chosen = set(list(drawn.values())[:most_per_document])
        made += [q for q in found if q.id in chosen]
    return made


def split(
    questions: Sequence[MadeQuestion], dev_share: float, seed: int = 0
) -> tuple[list[MadeQuestion], list[MadeQuestion]]:
    """Train and dev, about `dev_share` of the documents in dev and no document in both.

    A document's side follows from its id and the seed alone, so it stays when the corpus grows.
    """
    sides: tuple[list[MadeQuestion], list[MadeQuestion]] = ([], [])
    for question in questions:
        draw = random.Random(f"{seed}/{question.document_id}").random()
        sides[draw < dev_share].append(question)
    return sides


class _Draft(NamedTuple):
    """A question, and its answer's characters in the line."""

    question: str
    start: int
    end: int


def _of_passage(
    passage: Passage, topic: "_Topic", known: "_Known", generator: random.Random
) -> Iterator[MadeQuestion]:
    answered = set()
    for number, (start, end) in enumerate(passage.sentences):
        if end - start > SENTENCE_CHARACTERS:
            continue
        line = _line(passage, start, end)
        drafts = [
            _Draft(draft.question, line.origin[draft.start], line.origin[draft.end - 1] + 1)
            for draft in _drafts(line, topic, known, generator)
        ]
        if number == 0:
            drafts += _lifetime(passage.text, start, end, topic)
        for draft in drafts:
            question, place = _tidy(draft.question), (draft.start, draft.end)
            answer = passage.text[draft.start : draft.end]
            if place in answered or not _is_sound(question, answer, topic):
                continue
            answered.add(place)
            made_id = f"{passage.id}:{draft.start}-{draft.end}"
            at = (passage.id, passage.document_id, passage.title)
            yield MadeQuestion(made_id, question, (answer,), *at, *place)


def _tidy(question: str) -> str:
    question = " ".join(re.sub(r'["“”]', "", question.lower()).split())
    return re.sub(r" (?=[,.])", "", question).strip(" ,.;:") + "?"


_POINTS_OUTSIDE = re.compile(
    r"\b(?:this|these|those|such|latter|former|respectively|above|below|another|others?|here|same|both|neither|either|it"
    r"|ones?|not|than|more|so|e\.g|i\.e|etc)\b"
)
_FUNCTION_WORDS = frozenset("a an the of in on at and or to for from by with s".split())


def _is_sound(question: str, answer: str, topic: "_Topic") -> bool:
    words, answer_words = question.split(), _content(answer)
    return (
        QUESTION_WORDS[0] <= len(words) <= QUESTION_WORDS[1]
        and 1 <= len(answer.split()) <= ANSWER_WORDS
        and "\n" not in answer
        and not answer_words & _content(question)
        and not answer_words <= _content(topic.bare)
        and topic.bare.lower() not in answer.lower()
        and not _POINTS_OUTSIDE.search(question)
        and words[-1] not in ("a?", "an?", "and?", "but?", "or?", "the?")
        and not set(words) & ({"its", "his", "her"} - {topic.possessive})
    )


def _content(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower())) - _FUNCTION_WORDS


# -- What a document is about


class _Topic(NamedTuple):
    bare: str
    """The title without what tells it from others: "Psycho" for "Psycho (1960 film)"."""
    name: str
    """As a question calls it, article included: "the Zagros Mountains", "a hat"."""
    kind: str
    """Last word of "is a ... ": "city", "film"; empty if not understood."""
    person: bool
    possessive: str
    """its, his, her or their."""
    starts: re.Pattern[str]
    """What a sentence about the topic begins with."""


_PREPOSITIONS = frozenset(
    "in of on by for from with at to as near between within under during along against after before through into over"
    " among across around since until about via without".split()
)
_LINKS = frozenset("that which who whose whom where when while and or but".split())
_PRONOUNS = {"it": "its", "he": "his", "she": "her", "they": "their"}
_DEFINITION = re.compile(
    r"\b(?P<verb>is|are|was|were) (?:one of )?(?:(?P<article>the|an?|any) )?(?P<phrase>[^,.;:()]*)"
)
_FULL_NAME = re.compile(
    r"(?:The |An? )?((?:[\w.'’-]+ ){0,7}?[\w.'’-]+)(?=,|,? (?:is|was|are|were|also|known)\b)"
)
_TRADE = re.compile(
    r"[a-z-]*(?:er|or|ist|ian|eer|ess|man|woman|poet|monk|saint|architect|critic|chef|scholar|astronaut|pilot|admiral"
    r"|diplomat|spy|nurse|athlete|mystic|chemist|activist|playwright|aviator)"
)
_NO_TRADE = frozenset(
    "member founder leader ruler emperor river father mother daughter sister brother order number owner".split()
)


def _topic(passages: Sequence[Passage]) -> _Topic:
    first = passages[0]
    bare = re.sub(r" \([^)]*\)$", "", first.title).strip()
    text = " ".join(passage.text for passage in passages)
    opening = _line(first, *(first.sentences[0] if first.sentences else (0, len(first.text)))).text

    definition = _DEFINITION.search(opening)
    phrase = _noun_phrase(definition["phrase"]) if definition else []
    kind = phrase[-1] if definition and definition["article"] and phrase and phrase[-1].islower() else ""
    exact = re.match(rf"(?:(the|an?) )?({re.escape(bare)}(?:e?s)?)(?!\w)", opening, re.IGNORECASE)
    plural = bool(definition and exact and definition["verb"] in ("are", "were"))

    counts = {p: len(re.findall(rf"\b(?:{p}|{_PRONOUNS[p]})\b", text, re.IGNORECASE)) for p in _PRONOUNS}
    pronoun = max(counts, key=lambda p: counts[p])
    person = pronoun in ("he", "she") and counts[pronoun] > 0 and not plural and kind not in _MAKING
    person = person and not (exact and exact[1])  # "the Great Purge" is about people, but none itself
    if not any(counts.values()) and _TRADE.fullmatch(kind):
        person, pronoun = any(span.label == "PERSON" and span.start < 9 for span in first.spans), "he"
    if not person:
        pronoun = "they" if plural else "it"

    name = bare
    if exact and not person:
        name = f"{exact[1].lower()} {exact[2]}" if exact[1] else exact[2]
    elif not person and re.search(rf"\bthe {re.escape(bare)}\b(?! [A-Z])", text):
        name = f"the {bare}"
    starts = [re.escape(bare) + "(?:e?s)?", pronoun]
    full = _FULL_NAME.match(opening)  # "James Abbott McNeill Whistler was", "Italian is"
    if full and _content(full[1]) & _content(bare):
        starts.insert(0, re.escape(full[1]))
    if person and " " in bare:
        starts.append(re.escape(bare.split()[-1]))
    elif kind and not plural:
        starts += [f"the {re.escape(' '.join(phrase[-2:]))}", f"the {re.escape(kind)}"]
    begins = re.compile(rf"(?:(?:The|An?) )?(?:{'|'.join(starts)})(?![\w'’-])", re.IGNORECASE)
    return _Topic(bare, name, kind, person, _PRONOUNS[pronoun], begins)


def _noun_phrase(text: str) -> list[str]:
    """Words up to the first that cannot belong to a plain noun phrase."""
    words: list[str] = []
    for word, following in pairwise([*text.split(), ""]):
        leads_on = following in _PREPOSITIONS or following.endswith("ly")
        hangs = words and leads_on and (word in PARTICIPLES or word.endswith("ing"))
        if hangs or word in _PREPOSITIONS | _LINKS or (word.endswith("ly") and following in PARTICIPLES):
            break
        words.append(word)
    return words


class _Known(NamedTuple):
    """What the corpus says of names: the kind ("country", "person") behind each title, and its people's surnames."""

    kinds: Mapping[str, str]
    surnames: frozenset[str]

    def kind(self, name: str) -> str:
        """Its own last word if that is telling ("Zhejiang province"), else the corpus's; empty if unknown."""
        words = name.lower().split()
        own = next((word for word in reversed(words) if word in _NAMED), "")
        kind = own or self.kinds.get(name.lower(), "")
        return _ALIKE.get(kind, kind)


def _known(topics: Iterable[_Topic]) -> _Known:
    kinds = {topic.bare.lower(): "person" if topic.person else topic.kind for topic in topics}
    return _Known(kinds, frozenset(name.split()[-1] for name, kind in kinds.items() if kind == "person"))


_PLACES = frozenset(
    "country state city town village province region county district continent island kingdom municipality department"
    " prefecture republic peninsula territory ocean sea lake river borough valley desert governorate oblast voivodeship"
    " archipelago mountain".split()
)
_NAMED = _PLACES | frozenset(
    "university college school war prize award medal empire dynasty party church company band language century".split()
)
_ALIKE = {"metropolis": "city", "capital": "city", "subcontinent": "region", "nation": "country"}


def _who_or_what(answer: str, label: str, known: _Known) -> str | None:
    """The word that asks for a span; None where tagger and corpus do not agree on what it is."""
    kind = known.kind(answer)
    if kind == "person":
        return "who"
    if kind in _PLACES and label == "PERSON":
        return None
    if kind in _NAMED:
        return f"which {kind}"
    match label:
        case "PERSON":  # taggers take many a rare word for a person: two words, or somebody's surname
            named = " " in answer or answer.lower() in known.surnames
            return "who" if named and not kind and answer[0].isupper() else None
        case "NORP":
            return "who" if answer.endswith("s") else None
        case "LANGUAGE":
            return "which language"
        case "DATE":
            return None
    return "what"


# -- What is said of it


class _Line(NamedTuple):
    """A sentence without brackets; `origin` maps its characters to the passage's, spans count in `text`."""

    text: str
    origin: list[int]
    spans: list[Span]


def _line(passage: Passage, start: int, end: int) -> _Line:
    text = passage.text
    kept = []
    depth = 0
    for i in range(start, end):
        opens = text[i] in "(["
        depth += opens
        if depth == 0 and not (text[i] == " " and text[i + 1 : i + 2] in ("(", "[")):
            kept.append(i)
        depth -= text[i] in ")]" and depth > 0
    place = {origin: i for i, origin in enumerate(kept)}
    spans = [
        Span(place[span.start], place[span.end - 1] + 1, span.label)
        for span in passage.spans
        if start <= span.start < span.end <= end
        and span.start in place
        and place.get(span.end - 1) == place[span.start] + span.end - 1 - span.start
    ]
    return _Line(re.sub(r"\s", " ", "".join(text[i] for i in kept)), kept, spans)


class _Clause(NamedTuple):
    """What a verb says of the topic; the rest, behind the verb, is characters [start, end) of the line."""

    verb: str
    """As written: "was" of "was born"."""
    start: int
    end: int
    own: bool = True
    """False for a participle that hangs on the topic's noun, its "was" only understood: "a film directed by"."""

    @property
    def form(self) -> Form | None:
        """None for be and the modal verbs, which ask without do."""
        return HAVE.get(self.verb) or FORMS.get(self.verb)


_ADVERBS = frozenset(
    "also later then subsequently eventually soon finally often usually commonly typically generally primarily mainly"
    " predominantly officially formally originally initially thus therefore now currently still largely mostly widely"
    " probably traditionally further jointly together successfully briefly already again best especially particularly"
    " sometimes frequently historically ultimately once".split()
)
_OPENER = re.compile(
    r"(?:However|Initially|Originally|Eventually|Subsequently|Additionally|Moreover|Furthermore|Nevertheless|Finally"
    r"|Traditionally|Historically|Later|Thus|Also|Today|In addition),? "
)
_APPOSITION = {n: re.compile(rf",(?: [^,]{{1,70}},){{{n}}}(?= [a-z])") for n in (1, 2)}
_STOP = re.compile(
    r"[;:]| [–—-] |, (?=[a-z])|,? (?:and|but|or|then|yet) (?=(?:he|she|it|they|his|her|its|their|which|who|that|not)\b)"
    r"| (?:while|although|though|whereas|because|when|where|after|before|until|so that|which|who|whose|whom|that|as"
    r"|despite|if|unless|following|leading|including|such|making|resulting|becoming|being|having|using|causing|prior|due"
    r"|based|alongside|along|together)\b|\.?$"
)
_TOKEN = re.compile(r"[\w'’-]+|[^\w\s]")
_JOINT = re.compile(r"(?:,? |(?<= ))(?:and|or|but)\b")


def _clauses(line: _Line, topic: _Topic, at: int) -> Iterator[_Clause]:
    """Clauses of the subject at `at`: the main one, what hangs on its noun, and verbs joined by "and"."""
    text = line.text
    subject = topic.starts.match(text, at)
    if not subject:
        return
    # The verb follows at once, or behind one or two appositions: ", formally the Republic of Austria, is".
    apposed = [match.end() for n in (1, 2) if (match := _APPOSITION[n].match(text, subject.end()))]
    clause = next(filter(None, (_clause(text, place) for place in (subject.end(), *apposed))), None)
    if clause is None:
        return
    hanging = [_behind_comma(text, subject.end(), clause.verb)]
    if clause.verb in BE:
        hanging += [_on_noun(text, clause, topic), _behind_comma(text, clause.end, clause.verb)]
    yield from filter(None, hanging)
    while clause is not None:
        yield clause
        joint = _JOINT.match(text, clause.end)
        passive = clause.verb in BE and _next_word(text, clause.start) in PARTICIPLES
        clause = _clause(text, joint.end()) if joint else None
        if clause and passive and clause.verb in PARTICIPLES:  # "was elected in Bonn and crowned in Aachen"
            return


def _clause(text: str, at: int) -> _Clause | None:
    """The clause whose verb, adverbs aside, is the next word; None if it is no verb we know, or a perfect tense."""
    verb = _TOKEN.match(text, _skip(text, at))
    if not verb or (verb.group() not in BE | MODALS and verb.group() not in HAVE | FORMS):
        return None
    start = _skip(text, verb.end())
    following = _next_word(text, start)
    if verb.group() in HAVE and (following in PARTICIPLES or following == "been"):
        return None
    return _Clause(verb.group(), start, _end(text, start))


def _skip(text: str, at: int) -> int:
    """Where the next word begins that is no adverb."""
    return next((m.start() for m in _TOKEN.finditer(text, at) if m.group() not in _ADVERBS), len(text))


def _next_word(text: str, at: int) -> str:
    word = _TOKEN.match(text, _skip(text, at))
    return word.group() if word else ""


def _end(text: str, start: int) -> int:
    """Where a clause ends: at a comma, a link, or an "and" that another verb follows."""
    stop = _STOP.search(text, start)
    end = stop.start() if stop else len(text)
    for joint in _JOINT.finditer(text, start, end):
        word = _next_word(text, joint.end())
        past = word in FORMS and FORMS[word].do == "did"  # "works", "forms" may be nouns
        if past or word in PARTICIPLES or word in BE | MODALS or word in HAVE:
            return joint.start()
    return end


def _behind_comma(text: str, at: int, verb: str) -> _Clause | None:
    """A participle behind a comma: ", named after", ", located in"."""
    match = re.compile(r", (?P<participle>[a-z]+) (?P<preposition>[a-z]+) ").match(text, at)
    if not match or match["participle"] not in PARTICIPLES or match["preposition"] not in _PREPOSITIONS:
        return None
    start = match.start("participle")
    return _Clause(verb if verb in BE else "is", start, _end(text, start), own=False)


def _on_noun(text: str, clause: _Clause, topic: _Topic) -> _Clause | None:
    """What hangs on the noun of "is a ...": "who moved to", "that flows into", "directed by"; None if on another noun."""
    tokens = list(_TOKEN.finditer(text, clause.start))
    if not tokens or tokens[0].group() not in ("a", "an", "the", "one"):
        return None
    plain = True  # so far "a ... noun", without a preposition that would bring another noun
    for last, token, following in zip(tokens, tokens[1:], [*tokens[2:], tokens[-1]], strict=False):
        word = token.group()
        another = not plain and (
            last.group() == "," or last.group()[0].isupper()
        )  # "through her son, Aeneas, who"
        if (word == "who" and topic.person and not another) or (word in ("which", "that") and plain):
            return _clause(text, token.end())
        if word in ("who", "which", "that", "where", "whose", ";", ":"):
            return None
        if plain and token != tokens[1] and word in PARTICIPLES and following.group() in _PREPOSITIONS:
            return _Clause(clause.verb, token.start(), _end(text, token.start()), own=False)
        plain = plain and word not in _PREPOSITIONS and word not in (",", "and")
    return None


def _ask(wh: str, clause: _Clause, topic: _Topic, rest: str) -> str:
    """Question order: "when was T ...", "when did T ..."."""
    if clause.form is None:
        return f"{wh} {clause.verb} {topic.name} {rest}"
    return f"{wh} {clause.form.do} {topic.name} {clause.form.base} {rest}"


def _drafts(line: _Line, topic: _Topic, known: _Known, generator: random.Random) -> Iterator[_Draft]:
    opener = _OPENER.match(line.text)
    at = opener.end() if opener else 0
    lead = re.match(r"(?:In|On|During|Around) (?:the |about )?", line.text)
    date = next((s for s in line.spans if lead and s.start == lead.end() and s.label == "DATE"), None)
    if date:
        at = date.end + (line.text[date.end : date.end + 2] == ", ") + 1
    clauses = list(_clauses(line, topic, at))
    if not clauses:
        date = None
        behind = (match.end() for match in re.finditer(", ", line.text[:OPENING]))
        clauses = next(filter(None, (list(_clauses(line, topic, place)) for place in behind)), [])
    if date:
        main = next(clause for clause in clauses if clause.own)
        rest = line.text[main.start : main.end]
        yield _Draft(_ask("when", main, topic, rest), date.start, date.end)
    for clause in clauses:
        said = _Said(line, topic, clause, known, generator)
        for span in line.spans:
            if clause.start <= span.start and span.end <= clause.end and _is_whole(line, span):
                question = next(filter(None, (rule(said, span) for rule in _SPAN_RULES)), None)
                if question:
                    yield _Draft(question, span.start, span.end)
        yield from _identity(said)
        yield from _year(said)
        yield from _count(said)
        yield from _taxon(said)
    if clauses:
        yield from _measures(line, topic)
        yield from _borders(line, topic, known)
        yield from _alias(line, topic, clauses[0].verb)
    else:
        yield from _subject(line, topic, known)
        yield from _attribute(line, topic, known)


# -- Rules about a span in a clause: each gives a question or None


class _Said(NamedTuple):
    """A clause with all that a rule may ask about."""

    line: _Line
    topic: _Topic
    clause: _Clause
    known: _Known
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


_AFTER_ANSWER = (
    _PREPOSITIONS | _LINKS | _ADVERBS | frozenset("because if so alongside including following".split())
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


def _is_whole(line: _Line, span: Span) -> bool:
    """Whether the span is all of its noun phrase, and no item of a list, which would be half an answer."""
    answer, after = line.text[span.start : span.end], line.text[span.end :]
    following = re.match(r" ([\w-]+)", after)
    if following and (following[1] not in _AFTER_ANSWER or (following[1] == "of" and span.label != "DATE")):
        return False
    if answer.lower() in _VAGUE or _LIST_AFTER.match(after) or _LIST_BEFORE.search(line.text[: span.start]):
        return False
    if re.match(
        r", (?:the )?(?:[a-z]+ )?[A-Z]", after
    ):  # "Ulm, Germany" is no list, "Ulm, Bonn and Rome" is one
        listed = re.match(r", [\w’'. -]+,? (?:and|or) |, [\w’'. -]+, [A-Z]", after)
        return span.label in ("GPE", "LOC") and not listed
    return True


_EMBEDS = re.compile(
    r"\b(?:who|which|that|where|when|whose|whom|after|before|while|until|because|if|as|including|called|named|known"
    r"|titled|being|having|making|than|between|both|either|and the|and an?|but)\b|[;:]| by "
)


def _is_simple(text: str) -> bool:
    """Whether what stands between verb and answer is one phrase, so that the answer belongs to the verb."""
    words = text.split()
    bound = _ADVERBS | {"and", "been"}
    hanging = any(w in PARTICIPLES and words[n] not in bound for n, w in enumerate(words[1:]))
    return not hanging and not _EMBEDS.search(text) and "," not in text.rstrip(" ,")


_BY = re.compile(r"(?P<verb>[a-z]+) (?P<stuff>.*?)\bby (?:the |an? )?(?P<title>(?:[\w-]+ ){0,5})$")
_NO_DEED = frozenset(
    "consider regard know see call describe depict follow surround border give mean refer".split()
)


def _who_did(said: _Said, span: Span) -> str | None:
    """ "T was painted by ANSWER" -> who painted T?"""
    match = _BY.match(said.before(span))
    if not match or not said.is_passive(said.before(span)) or not _is_simple(match["stuff"]):
        return None
    if set(match["title"].split()) & (_PREPOSITIONS | _LINKS):
        return None
    if said.clause.own and said.clause.verb in ("is", "are"):  # "is governed by": not one deed
        return None
    base = PARTICIPLES[match["verb"]]
    who = _who_or_what(said.answer(span), span.label, said.known)
    if who == "what" and span.label == "ORG":
        who = "who"
    if not who or who == "what" or base in _NO_DEED or base not in PAST:
        return None
    return f"{who} {PAST[base]} {said.topic.name} {match['stuff']} {said.after(span)}"


_MAKING = {
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
"""Kind of a work -> what its maker did."""
_RELEASED = frozenset("film album song game".split())


def _who_made(said: _Said, span: Span) -> str | None:
    """ "T is a novel by ANSWER" -> who wrote T?"""
    match = re.match(
        r"(?:an?|the) (?P<noun>[^,.;]*?) by (?:the )?(?P<title>(?:[\w-]+ ){0,5})$", said.before(span)
    )
    kind = match["noun"].split()[-1] if match and match["noun"] else ""
    if said.clause.verb not in BE or kind not in _MAKING or kind != said.topic.kind:
        return None
    return f"who {_MAKING[kind]} {said.topic.name}" if span.label in ("PERSON", "ORG") else None


_TIME = re.compile(r"(?:^|(?<= ))(?:in|on|during|around|circa) (?:the |about |around )?$")
_OFFICE = re.compile(r"the (?:first|last|capital|president|prime|king|queen|leader)\b")


def _when(said: _Said, span: Span) -> str | None:
    """ "T was founded in ANSWER" -> when was T founded?"""
    clause, match = said.clause, _TIME.search(said.before(span))
    if span.label != "DATE" or not match or clause.verb in ("has", "have"):
        return None
    rest = said.before(span)[: match.start()].rstrip(" ,")
    if not _is_simple(rest):
        return None
    if clause.verb in BE:
        state = re.match(r"(?:an?|the|one|among)\b", rest) and not _OFFICE.match(rest)
        if not rest or state:
            return None
        if not clause.own and re.search(r"\d", said.answer(span)):
            clause = clause._replace(verb={"is": "was", "are": "were"}.get(clause.verb, clause.verb))
    if re.match(r"(?:born|died)\b", rest):
        return _ask("when", clause, said.topic, rest.split()[0])
    year = re.fullmatch(r"\d{3,4}", said.answer(span))
    wh = said.generator.choice(("when", "when", "in what year")) if year else "when"
    return _ask(wh, clause, said.topic, f"{rest} {said.after(span)}")


_PLACE = re.compile(
    r"(?:^|(?<= ))(?P<preposition>in|at|on|near|within|of) (?:the )?"
    rf"(?:(?:[\w.-]+ )?(?P<kind>{'|'.join(sorted(_PLACES))}) of )?(?:the )?"
    r"(?:(?:(?:north|south)?-?(?:east|west)?(?:ern)?|central|mainland|continental|modern-day|present-day|modern|ancient"
    r"|upper|lower) )?$"
)
_RANK = re.compile(
    r"the (?:\w+ and )?(?:capital|first|last|only|second|third|fourth|fifth|main|major|most|[\w-]+est\b)"
)
_ENDS_IN_VERB = re.compile(r"\b(?!king|building|painting|spring|wing|ring|ruling)[a-z]+ing$")
_NO_PLACE = frozenset(
    "result culminate specialise specialize believe succeed consist engage participate share include".split()
)


def _where(said: _Said, span: Span) -> str | None:
    """ "T was born in ANSWER" -> where was T born?; "T is the capital of ANSWER" -> which country is T the capital of?"""
    match = _PLACE.search(said.before(span))
    if (
        not match
        or (span.label not in ("GPE", "LOC", "FAC", "ORG") and not match["kind"])
        or span.label == "DATE"
    ):
        return None
    preposition, kind = match["preposition"], match["kind"] or said.known.kind(said.answer(span))
    if kind == "person" or (span.label == "ORG" and preposition != "at" and kind not in _PLACES):
        return None
    kind = kind if kind in _PLACES else ""
    stem = said.before(span)[: match.start()].rstrip(" ,")
    if not _is_simple(stem) or "border" in stem:
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
    wh = "where"
    if kind and said.generator.random() < 0.5:
        wh = f"{'on' if preposition == 'on' else 'in'} which {kind}"
    return _ask(wh, said.clause, said.topic, rest)


def _where_is(said: _Said, stem: str, preposition: str, kind: str) -> str | None:
    others = set(stem.split()) & (_PREPOSITIONS - {"of"})
    if said.topic.person or others or len(stem.split()) > 8 or _ENDS_IN_VERB.search(stem):
        return None
    if said.topic.kind in _MAKING or _content(stem) & _content(said.topic.bare):
        return None
    if re.match(r"an? ", stem) and preposition == "in":
        wh, rest = (f"which {kind}", "in") if kind else ("where", "located")
        return _ask(wh, said.clause, said.topic, rest)
    if _RANK.match(stem) and kind and preposition in ("in", "of"):
        return _ask(f"which {kind}", said.clause, said.topic, f"{stem} {preposition}")
    return None


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


def _what_for(said: _Said, span: Span) -> str | None:
    """Preposition left behind: "T is named after ANSWER" -> who is T named after?"""
    match, clause = _STRANDED.search(said.before(span)), said.clause
    if not match or span.label in ("DATE", "NORP"):
        return None
    stem, preposition = said.before(span)[: match.start()].rstrip(" ,"), match["preposition"]
    others = set(stem.split()) & (_PREPOSITIONS - {"of"})
    if not stem or others or not _is_simple(stem) or len(stem.split()) > 7 or stem.startswith("born"):
        return None
    passive = said.is_passive(stem)
    if clause.verb in BE and not passive:
        nested = preposition == "of" and " of " in f" {stem} "
        relation = preposition == "of" and _RELATION.match(stem)
        if (
            preposition == "in"
            or nested
            or _ENDS_IN_VERB.search(stem)
            or not (relation or _PREDICATE.match(stem))
        ):
            return None
    elif clause.form and clause.form.base in _LISTING - {"become"}:
        return None
    wh = _who_or_what(said.answer(span), span.label, said.known)
    if preposition == "of" and _ENDS_IN_KIN.search(stem):
        wh = "who"
    if not wh or (wh == "what" and preposition in ("after", "during", "in", "at") and not passive):
        return None
    return _ask(wh, clause, said.topic, f"{stem} {preposition}")


def _object(said: _Said, span: Span) -> str | None:
    """ "T married ANSWER" -> who did T marry?"""
    form = said.clause.form
    wh = _who_or_what(said.answer(span), span.label, said.known)
    if (
        said.before(span) not in ("", "the ")
        or form is None
        or form.base in _LISTING
        or span.label == "NORP"
        or not wh
    ):
        return None
    return _ask(wh, said.clause, said.topic, said.after(span))


_SPAN_RULES = (_who_did, _who_made, _when, _where, _what_for, _object)


# -- Rules that look for their own answer


_WORK = re.compile(
    r" (?:(?:influential|prominent|leading|prolific|famous|noted|major|former|early|renowned|professional) )*"
    r"(?P<noun>[a-z-]+(?: [a-z-]+){0,2}?)(?= and|,|\.| who| of| in| from| at| known| best| whose|$)"
)


def _identity(said: _Said) -> Iterator[_Draft]:
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
    if _TRADE.fullmatch(noun) and noun not in _NO_TRADE and said.generator.random() < 0.5:
        do = {"is": "does", "was": "did"}[verb]
        wordings = (f"what {do} {name} do for a living", f"what {verb} the profession of {name}")
        yield _Draft(said.generator.choice(wordings), *work.span("noun"))
    else:
        wordings = (f"what nationality {verb} {name}", f"what {verb} the nationality of {name}")
        yield _Draft(said.generator.choice(wordings), nation.start, nation.end)


def _year(said: _Said) -> Iterator[_Draft]:
    """ "T is a 1968 film" -> when was T released?"""
    match = re.compile(r"an? (?P<year>\d{4}) ").match(said.line.text, said.clause.start)
    kind, name = said.topic.kind, said.topic.name
    if match and said.clause.verb in BE and kind in _MAKING:
        wording = f"when was {name} released" if kind in _RELEASED else f"what year is the {kind} {name} from"
        yield _Draft(wording, *match.span("year"))


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


def _count(said: _Said) -> Iterator[_Draft]:
    """ "T has ANSWER provinces" -> how many provinces does T have?"""
    clause = said.clause
    match = _COUNT.match(said.line.text, clause.start)
    if not match or not (clause.verb in _COUNTING or (clause.verb in BE and match["into"])):
        return
    words = match["noun"].split()
    if not set(words) & (_PREPOSITIONS | _LINKS) and words[-1] not in _NO_COUNT:
        wording = _ask(f"how many {match['noun']}", clause, said.topic, match["into"] or "")
        yield _Draft(wording, *match.span("count"))


_TAXON = re.compile(
    r"(?:in|of|within|to) the (?:[a-z-]+ )?(?P<rank>(?:sub|super)?family|genus|(?:sub|infra)?order|class|phylum|tribe)"
    r" (?P<taxon>[A-Z][a-z]+)(?=[,.;]| (?:and|in|of|that|which|native|found)\b|$)"
)


def _taxon(said: _Said) -> Iterator[_Draft]:
    """ "T is a plant in the family ANSWER" -> which family does T belong to?"""
    clause = said.clause
    match = _TAXON.search(said.line.text, clause.start, clause.end)
    if match and clause.own and clause.verb in ("is", "are", "belongs", "belong"):
        do = "do" if clause.verb in ("are", "belong") else "does"
        yield _Draft(f"which {match['rank']} {do} {said.topic.name} belong to", *match.span("taxon"))


_MEASURE = re.compile(
    r"(?P<measure>(?:(?:total|average|mean|maximum|surface|land|urban|metropolitan) )*(?:population density|population|area"
    r"|length|height|elevation|depth|diameter|radius|mass|altitude|volume|width|orbital period|atomic number|wingspan))"
    rf" (?:of |is |was )?{_ROUGHLY}(?P<amount>{_NUMBER}(?: ?(?:km2|km²|sq mi|square (?:kilomet(?:re|er)s|miles)|kilomet"
    r"(?:re|er)s|km|met(?:re|er)s|m|feet|ft|miles|mi|kg|tonnes|days|years|people|inhabitants)\b)?)(?![\w%]|[.,]\d| ?×)"
)


def _measures(line: _Line, topic: _Topic) -> Iterator[_Draft]:
    """ "with a population of ANSWER" -> what is the population of T?"""
    for match in _MEASURE.finditer(line.text):
        if topic.person or re.search(r"\b(?:which|whose|where|who|than|after)\b", line.text[: match.start()]):
            return
        following = re.match(r" ([a-z]+)", line.text[match.end() :])
        if not following or following[1] in _AFTER_ANSWER:
            yield _Draft(f"what is the {match['measure']} of {topic.name}", *match.span("amount"))


_DIRECTION = re.compile(
    r" (?:to|on|in) (?P<direction>the (?:(?:north|south)-?(?:east|west)?|east|west))(?=[,.;]| and (?:[A-Z]|at |the [A-Z]))"
)


def _borders(line: _Line, topic: _Topic, known: _Known) -> Iterator[_Draft]:
    """ "T borders ANSWER to the north, ..." -> which country borders T to the north?"""
    verb = re.search(r"\bborder(?:s|ed by)\b", line.text)
    for span in line.spans if verb else []:
        toward = _DIRECTION.match(line.text, span.end)
        shared = re.search(r"[A-Z][\w’'-]*(?: and [^,]*|,(?: and)? (?:the )?)$", line.text[: span.start])
        if verb and verb.end() < span.start and toward and not shared:
            wh = _who_or_what(line.text[span.start : span.end], span.label, known)
            if wh and wh != "who":
                yield _Draft(f"{wh} borders {topic.name} to {toward['direction']}", span.start, span.end)


_ALIAS = re.compile(
    r"(?:, |\b(?:is|was|are|were) )(?P<how>(?:also|better|commonly|popularly|often|sometimes|formerly|originally|previously"
    r"|once|colloquially|historically) (?:(?:known|referred to) as|called|named)) (?:the |simply |an? )?[\"“]?"
    r"(?!(?:after|among|as|by|for|in|one) )(?P<alias>\w[\w .'’-]{1,40}?)"
    r"(?=[\"”]?(?:[,;.]|$| (?:is|was|and|or|in|by|for|to|from|because)\b))"
)


def _alias(line: _Line, topic: _Topic, verb: str) -> Iterator[_Draft]:
    """ "T, also known as ANSWER," -> what is T also known as?"""
    match = _ALIAS.search(line.text)
    if match and not re.search(r"\b(?:which|whose|where|who|that|of)\b", line.text[: match.start()]):
        be = "was" if topic.person else "are" if topic.possessive == "their" else verb if verb in BE else "is"
        yield _Draft(f"what {be} {topic.name} {match['how']}", *match.span("alias"))


# -- Rules for sentences whose subject is not the topic


def _subject(line: _Line, topic: _Topic, known: _Known) -> Iterator[_Draft]:
    """ "ANSWER painted T in 1937" -> who painted T in 1937?"""
    at = 4 if line.text.startswith("The ") else 0
    span = next((span for span in line.spans if span.start == at), None)
    clause = _clause(line.text, span.end) if span and line.text[span.end : span.end + 1] == " " else None
    if not span or not clause or clause.verb in ("is", "are"):
        return
    rest = line.text[clause.start : clause.end]
    wh = _who_or_what(line.text[span.start : span.end], span.label, known)
    if wh and wh != "what" and re.search(rf"\b{re.escape(topic.bare)}\b", rest, re.IGNORECASE):
        yield _Draft(f"{wh} {clause.verb} {rest}", span.start, span.end)


_ATTRIBUTE = re.compile(
    r"(?:(?P<whose>Its|His|Her|Their)|The) (?P<noun>[\w-]+(?: [\w-]+){0,4}?) (?P<verb>is|was|are|were) (?:the )?(?:city of )?"
)
_SUPERLATIVE = re.compile(r"(?:capital|current|first|last|main|most|official|[a-z]+est)\b")


def _attribute(line: _Line, topic: _Topic, known: _Known) -> Iterator[_Draft]:
    """ "Its capital is ANSWER" -> what is the capital of T?"""
    match = _ATTRIBUTE.match(line.text)
    span = next((span for span in line.spans if match and span.start == match.end()), None)
    if not match or not span or span.label == "NORP" or not _is_whole(line, span):
        return
    noun, whose = match["noun"], match["whose"]
    ours = (
        whose.lower() == topic.possessive
        if whose
        else _SUPERLATIVE.match(noun) and not set(noun.split()) & _PREPOSITIONS
    )
    wh = _who_or_what(line.text[span.start : span.end], span.label, known)
    if (
        ours
        and wh
        and not set(noun.split()) & (_LINKS - {"and"})
        and not _content(noun) & _content(topic.bare)
    ):
        wh = "who" if wh == "who" else "what"
        yield _Draft(f"{wh} {match['verb']} the {noun} of {topic.name}", span.start, span.end)


_DAY = r"(?:\d{1,2} [A-Z][a-z]+ \d{3,4}|[A-Z][a-z]+ \d{1,2}, \d{4}|\d{3,4})(?: (?:BCE?|AD|CE))?"
_LIFE = re.compile(
    rf"(?:^|[;,] |(?P<only>\bborn )|c\. )(?P<born>{_DAY})(?: ?[–-] ?(?:c\. )?(?P<died>{_DAY}))?$"
)


def _lifetime(text: str, start: int, end: int, topic: _Topic) -> Iterator[_Draft]:
    """ "(26 July 1928 – 7 March 1999)" behind a person's name -> when was T born, when did T die? Offsets in the passage."""
    bracket = re.compile(r"(?P<name>[^.(]{1,80})\((?P<inside>[^()]*)\)").match(text, start, end)
    if not bracket or not topic.person or re.search(r" (?:is|was) ", bracket["name"]):
        return
    life = _LIFE.search(bracket["inside"])
    if life and (life["died"] or life["only"]):
        at = bracket.start("inside")
        yield _Draft(f"when was {topic.name} born", at + life.start("born"), at + life.end("born"))
        if life["died"]:
            yield _Draft(f"when did {topic.name} die", at + life.start("died"), at + life.end("died"))
