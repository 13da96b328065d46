"""Applies all rules to a sentence."""

import random
import re
from collections.abc import Iterator

from realm.questions.clauses import ask, find_clauses
from realm.questions.facts import alias, borders, count, identity, measures, taxon, year
from realm.questions.lines import Line
from realm.questions.names import Known
from realm.questions.other_subjects import attribute, subject
from realm.questions.rules import Draft, Said, is_whole
from realm.questions.topics import Topic
from realm.questions.when_where import when, where
from realm.questions.who import direct_object, what_for, who_did, who_made

OPENING = 120
"""The subject of a sentence must begin within this number of characters: "After some years in Paris, he"."""
_OPENER = re.compile(
    r"(?:However|Initially|Originally|Eventually|Subsequently|Additionally|Moreover|Furthermore|Nevertheless|Finally"
    r"|Traditionally|Historically|Later|Thus|Also|Today|In addition),? "
)
_SPAN_RULES = (who_did, who_made, when, where, what_for, direct_object)


def draft_questions(line: Line, topic: Topic, known: Known, generator: random.Random) -> Iterator[Draft]:
    """The questions that the rules make from one sentence. If a rule has several wordings, the generator draws one."""
    opener = _OPENER.match(line.text)
    at = opener.end() if opener else 0
    lead = re.match(r"(?:In|On|During|Around) (?:the |about )?", line.text)
    date = next((s for s in line.spans if lead and s.start == lead.end() and s.label == "DATE"), None)
    if date:
        at = date.end + (line.text[date.end : date.end + 2] == ", ") + 1
    clauses = list(find_clauses(line, topic, at))
    if not clauses:
        date = None
        behind = (match.end() for match in re.finditer(", ", line.text[:OPENING]))
        clauses = next(filter(None, (list(find_clauses(line, topic, place)) for place in behind)), [])
    if date:
        main = next(clause for clause in clauses if clause.own)
        rest = line.text[main.start : main.end]
        yield Draft(ask("when", main, topic, rest), date.start, date.end)
    for clause in clauses:
        said = Said(line, topic, clause, known, generator)
        for span in line.spans:
            if clause.start <= span.start and span.end <= clause.end and is_whole(line, span):
                question = next(filter(None, (rule(said, span) for rule in _SPAN_RULES)), None)
                if question:
                    yield Draft(question, span.start, span.end)
        yield from identity(said)
        yield from year(said)
        yield from count(said)
        yield from taxon(said)
    if clauses:
        yield from measures(line, topic)
        yield from borders(line, topic, known)
        yield from alias(line, topic, clauses[0].verb)
    else:
        yield from subject(line, topic, known)
        yield from attribute(line, topic, known)
