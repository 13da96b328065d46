"""Finds clauses whose subject is the topic, and turns the word order of a clause into that of a question."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from realm.questions.lines import Line
from realm.questions.topics import Topic
from realm.questions.verbs import BE, FORMS, HAVE, INTRANSITIVE, MODALS, PARTICIPLES, Form
from realm.questions.words import ADVERBS, PREPOSITIONS


class Clause(NamedTuple):
    """A verb whose subject is the topic, and the rest of the clause after the verb: characters [start, end) of the line."""

    verb: str
    """The verb as written: "was" of "was born"."""
    start: int
    end: int
    own: bool = True
    """False for a participle after a noun, for which "is" or "was" is implied: "a film directed by"."""

    @property
    def form(self) -> Form | None:
        """None for forms of "be" and for modal verbs, which need no "do" in a question."""
        return HAVE.get(self.verb) or FORMS.get(self.verb)


_APPOSITION = {n: re.compile(rf",(?: [^,]{{1,70}},){{{n}}}(?= [a-z])") for n in (1, 2)}
_STOP = re.compile(
    r"[;:]| [–—-] |, (?=[a-z])|,? (?:and|but|or|then|yet) (?=(?:he|she|it|they|his|her|its|their|which|who|that|not)\b)"
    r"| (?:while|although|though|whereas|because|when|where|after|before|until|so that|which|who|whose|whom|that|as"
    r"|despite|if|unless|following|leading|including|such|making|resulting|becoming|being|having|using|causing|prior|due"
    r"|based|alongside|along|together)\b|\.?$"
)
_TOKEN = re.compile(r"[\w'’-]+|[^\w\s]")
_JOINT = re.compile(r"(?:,? |(?<= ))(?:and|or|but)\b")


def find_clauses(line: Line, topic: Topic, at: int) -> Iterator[Clause]:
    """Clauses of the subject that begins at character `at`: main clause, participles, relative clauses, verbs after "and"."""
    text = line.text
    subject = topic.starts.match(text, at)
    if not subject:
        return
    # The verb follows the subject directly, or after one or two appositions: ", formally the Republic of Austria, is".
    apposed = [match.end() for n in (1, 2) if (match := _APPOSITION[n].match(text, subject.end()))]
    clause = next(filter(None, (clause_at(text, place) for place in (subject.end(), *apposed))), None)
    if clause is None:
        return
    hanging = [_behind_comma(text, subject.end(), clause.verb)]
    if clause.verb in BE:
        hanging.append(_on_noun(text, clause, topic))
        if _next_word(text, clause.start) not in PARTICIPLES:
            # The topic is not what was spoken in "are thought to descend from Proto-Slavic, spoken during".
            hanging.append(_behind_comma(text, clause.end, clause.verb))
    yield from filter(None, hanging)
    while clause is not None:
        yield clause
        joint = _JOINT.match(text, clause.end)
        passive = clause.verb in BE and _next_word(text, clause.start) in PARTICIPLES
        clause = clause_at(text, joint.end()) if joint else None
        if clause and passive and clause.verb in PARTICIPLES:  # "was elected in Bonn and crowned in Aachen"
            return


def clause_at(text: str, at: int) -> Clause | None:
    """The clause whose verb is the next word that is not an adverb; None if this is no known verb or begins a perfect tense."""
    verb = _TOKEN.match(text, _skip(text, at))
    if not verb or (verb.group() not in BE | MODALS and verb.group() not in HAVE | FORMS):
        return None
    start = _skip(text, verb.end())
    following = _next_word(text, start)
    if verb.group() in HAVE and (following in PARTICIPLES or following == "been"):
        return None
    return Clause(verb.group(), start, _end(text, start))


def _skip(text: str, at: int) -> int:
    """The position of the next word that is not an adverb."""
    return next((m.start() for m in _TOKEN.finditer(text, at) if m.group() not in ADVERBS), len(text))


def _next_word(text: str, at: int) -> str:
    word = _TOKEN.match(text, _skip(text, at))
    return word.group() if word else ""


def _end(text: str, start: int) -> int:
    """The end of a clause: a comma, a word of `_STOP`, or "and" before another verb."""
    stop = _STOP.search(text, start)
    end = stop.start() if stop else len(text)
    for joint in _JOINT.finditer(text, start, end):
        word = _next_word(text, joint.end())
        past = word in FORMS and FORMS[word].do == "did"  # present forms such as "works" may be nouns
        if past or word in PARTICIPLES or word in BE | MODALS or word in HAVE:
            return joint.start()
    return end


def _is_passive(word: str) -> bool:
    """Whether the word is a participle before which "was" can be implied."""
    return word in PARTICIPLES and PARTICIPLES[word] not in INTRANSITIVE


def _behind_comma(text: str, at: int, verb: str) -> Clause | None:
    """The clause of a participle after a comma: ", named after", ", located in"."""
    match = re.compile(r", (?P<participle>[a-z]+) (?P<preposition>[a-z]+) ").match(text, at)
    if not match or not _is_passive(match["participle"]) or match["preposition"] not in PREPOSITIONS:
        return None
    start = match.start("participle")
    return Clause(verb if verb in BE else "is", start, _end(text, start), own=False)


def _on_noun(text: str, clause: Clause, topic: Topic) -> Clause | None:
    """The clause after the noun of "is a ...": "who moved to", "that flows into", "directed by"; None if there is none."""
    tokens = list(_TOKEN.finditer(text, clause.start))
    if not tokens or tokens[0].group() not in ("a", "an", "the", "one"):
        return None
    plain = True  # no preposition so far, so there is only one noun
    for last, token, following in zip(tokens, tokens[1:], [*tokens[2:], tokens[-1]], strict=False):
        word = token.group()
        # "who" belongs to another noun in "through her son, Aeneas, who".
        another = not plain and (last.group() == "," or last.group()[0].isupper())
        if (word == "who" and topic.person and not another) or (word in ("which", "that") and plain):
            return clause_at(text, token.end())
        if word in ("who", "which", "that", "where", "whose", ";", ":"):
            return None
        if plain and token != tokens[1] and _is_passive(word) and following.group() in PREPOSITIONS:
            return Clause(clause.verb, token.start(), _end(text, token.start()), own=False)
        plain = plain and word not in PREPOSITIONS and word not in (",", "and")
    return None


def ask(wh: str, clause: Clause, topic: Topic, rest: str) -> str:
    """The question in its word order: "when was T ...", "when did T ..."."""
    if clause.form is None:
        return f"{wh} {clause.verb} {topic.name} {rest}"
    return f"{wh} {clause.form.do} {topic.name} {clause.form.base} {rest}"
