"""Questions made from a corpus by rules, for corpora that nobody has written questions for.

1. `topics`    a document's opening tells how its subject is called, whether it is a person, and of what kind.
2. `lines`     a sentence without its brackets remembers where every character stood in the passage.
3. `clauses`   finds what is said of the topic: verb and rest. The topic may stand there as a pronoun, a surname or
   "the city"; the question calls it by name, so that it stands on its own.
4. `drafts`    the rules turn a clause around a salient span, a number or a name into a question that this answers:
   `who` and `when_where` ask for a span, `facts` for what they find themselves, `other_subjects` where the sentence
   begins with something else than the topic.
5. `sound`     drops what gives its answer away, points outside itself, or is too short or too long.

There is no parser: sentences and spans come with the passages, grammar is a table of verbs (`verbs`) and a few patterns,
and the corpus's own titles say what is a country and who is a person (`names`). A sentence that is not understood makes no
question. Questions are in lower case with a question mark, as in WebQuestions. English only.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from realm.qa.metrics import normalise_answer
from realm.questions.drafts import draft_questions
from realm.questions.lines import line_of
from realm.questions.names import Known, known_names
from realm.questions.other_subjects import lifetime
from realm.questions.rules import Draft
from realm.questions.sound import is_sound, tidy
from realm.questions.topics import Topic, topic_of
from realm.text.corpus import Passage

__all__ = ["MadeQuestion", "make_questions", "split"]

SENTENCE_CHARACTERS = 1000
"""A longer sentence is a table or a list."""


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
    topics = {document: topic_of(parts) for document, parts in documents.items()}
    known = known_names(topics.values())
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


def _of_passage(
    passage: Passage, topic: Topic, known: Known, generator: random.Random
) -> Iterator[MadeQuestion]:
    answered = set()
    for number, (start, end) in enumerate(passage.sentences):
        if end - start > SENTENCE_CHARACTERS:
            continue
        line = line_of(passage, start, end)
        drafts = [
            Draft(draft.question, line.origin[draft.start], line.origin[draft.end - 1] + 1)
            for draft in draft_questions(line, topic, known, generator)
        ]
        if number == 0:
            drafts += lifetime(passage.text, start, end, topic)
        for draft in drafts:
            question, place = tidy(draft.question), (draft.start, draft.end)
            answer = passage.text[draft.start : draft.end]
            if place in answered or not is_sound(question, answer, topic):
                continue
            answered.add(place)
            made_id = f"{passage.id}:{draft.start}-{draft.end}"
            at = (passage.id, passage.document_id, passage.title)
            yield MadeQuestion(made_id, question, (answer,), *at, *place)
