"""Makes questions from a corpus by rules, for corpora for which nobody has written questions.

1. `topics`    finds the topic of a document from its first sentence: its name, its kind, and whether it is a person.
2. `lines`     removes brackets from a sentence, and keeps the position of every character in the passage.
3. `clauses`   finds clauses whose subject is the topic: a verb and the rest. The subject may also be a pronoun, a surname or
   "the city"; the question contains the name instead, so that the question can be understood alone.
4. `drafts`    applies the rules, which make a question from a clause and a salient span, a number or a name that is the answer.
   The rules of `who` and `when_where` ask for a salient span, and those of `facts` for an answer that they find themselves.
   The rules of `other_subjects` are for sentences whose subject is not the topic.
5. `sound`     drops questions that contain their answer, cannot be understood alone, or are too short or too long.

`review` lets a person accept, correct or reject questions.

No parser is used. Sentences and spans come with the passages, and the grammar is a table of verbs (`verbs`) and a few patterns.
The titles of the corpus show which names are countries or people (`names`). No question is made from a sentence that matches no
pattern. Questions are in lower case with a question mark, as in WebQuestions. The rules are for English.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from realm.errors import at_least, check_shares
from realm.qa.scoring.metrics import normalise_answer
from realm.questions.drafts import draft_questions
from realm.questions.lines import line_of
from realm.questions.names import Known, known_names
from realm.questions.other_subjects import lifetime
from realm.questions.rules import Draft
from realm.questions.sound import is_sound, tidy
from realm.questions.topics import Topic, topic_of
from realm.text.corpus import Passage

__all__ = ["MadeQuestion", "QuestionsConfig", "make_questions", "split"]

SENTENCE_CHARACTERS = 1000
"""Longest sentence from which questions are made; a longer one is probably a table or a list."""


@dataclass(frozen=True)
class QuestionsConfig:
    """Settings of `realm questions`."""

    seed: int = 0
    """Seed for the choice of questions, wordings and dev documents."""
    dev_share: float = 0.1
    """Share of documents whose questions are dev questions."""
    documents: str = ""
    """Questions are made only from documents whose id or title begins with this text; if it is empty, from all documents."""

    def __post_init__(self) -> None:
        at_least(self, seed=0)
        check_shares(self, "dev_share")


class MadeQuestion(NamedTuple):
    """A question, and the place of its answer: `passage.text[answer_start:answer_end] == answers[0]`."""

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
    """Questions in the order of documents and places; equal passages and seeds give equal questions.

    If the rules find more than `most_per_document` questions in a document, this number of them is drawn. No two questions of
    a document have the same answer or the same wording. The seed also chooses between wordings. The first passage of a
    document should precede its other passages, because its first sentence defines the topic.
    """
    documents: dict[str, list[Passage]] = {}
    for passage in {
        passage.id: passage for passage in passages
    }.values():  # two documents may contain the same passage
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
    """Train and dev questions. About `dev_share` of the documents are in dev, and no document is in both.

    The part of a document depends only on its id and the seed, so it does not change when the corpus grows.
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
