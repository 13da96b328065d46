"""Fine-tuning examples: training questions, the passages that a step reads, and the positions of answers in these passages.

Axis letters: B questions, N retrieved passages, K passages read, U distinct passages, W span widths, T tokens, D embedding,
R rows (a question and a passage each)."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from realm.keys import Lookup, key_of
from realm.model.folder import Model
from realm.model.span_reader import SpanReader, body_mask
from realm.qa.question_files import Question
from realm.qa.scoring.metrics import Containment, has_answer
from realm.qa.spans import answer_pieces, body_start, correct_mask
from realm.store.knowledge_base import KnowledgeBase
from realm.text.corpus import Passage
from realm.tokens.layouts import NULL_PASSAGE, Tokens, passage_inputs, query_inputs, reading_inputs
from realm.train.run_config import generator

PASSAGES_KEPT = 50_000
"""Number of passages whose texts stay in memory; a text needs about 3 kB, so all texts need 150 MB. If a step retrieves more
passages, all passages of this step stay in memory."""


class Rows(NamedTuple):
    """Inputs of the span reader. A row is a question and one of its passages; the rows of one question follow each other."""

    tokens: Tokens
    body_RT: Tensor
    """True at the tokens of the passage that may be part of an answer."""
    correct_RWT: Tensor
    """True at the spans that are answers; a span is identified by its width and its first token."""
    questions: int
    """Number of questions."""

    def that_teach(self, reader: SpanReader) -> tuple["Rows", Tensor]:
        """The rows of the questions that can train the reader, and the numbers of these questions -> [b], at least one.

        A question whose passages contain no answer can train a reader only if the reader can find "no answer". If no question
        can train the reader, the result has the first question.
        """
        passages = len(self.body_RT) // self.questions
        readable_B = self.correct_RWT.flatten(1).any(dim=1).view(self.questions, passages).any(dim=1)
        if reader.config.finds_none or bool(readable_B.all()):
            return self, torch.arange(self.questions)
        asked_b = (
            readable_B.nonzero().squeeze(1) if bool(readable_B.any()) else readable_B.new_zeros(1).long()
        )
        row_bK = asked_b[:, None] * passages + torch.arange(passages)
        return self.of(row_bK.flatten())._replace(questions=len(asked_b)), asked_b

    def to(self, device: torch.device) -> "Rows":
        body_RT, correct_RWT = (t.to(device, non_blocking=True) for t in (self.body_RT, self.correct_RWT))
        return Rows(self.tokens.to(device), body_RT, correct_RWT, self.questions)

    def of(self, rows: Tensor) -> "Rows":
        """The rows with the given numbers, cut to the length of the longest of these rows."""
        tokens = self.tokens.rows(rows)
        length = tokens.ids_BT.shape[1]
        return Rows(
            tokens, self.body_RT[rows, :length], self.correct_RWT[rows, :length, :length], self.questions
        )


class Examples:
    """Training questions, and the inputs of embedder and reader that are made from questions and passages."""

    def __init__(
        self, kb: KnowledgeBase, model: Model, questions: Sequence[Question], contains: Containment = "tokens"
    ):
        self._kb, self._model, self._questions, self._contains = kb, model, questions, contains
        self._ids = model.tokenizer.encode([q.question for q in questions])
        self._answer_ids = [  # without answers that contain [UNK], which would match every unknown word
            [
                ids
                for ids in model.tokenizer.encode(q.answers)
                if model.tokenizer.unk_id not in ids and not q.regex
            ]
            for q in questions
        ]
        self._passages: dict[int, Passage] = {}
        self._by_document = Lookup(kb.document_keys_N)

    def batch(self, seed: int, step: int, size: int) -> np.ndarray:
        """Numbers of the questions of a step -> [B]. Each question is used once per epoch; each epoch has a random order."""
        places = np.arange(step * size, (step + 1) * size)
        count = len(self._questions)
        orders = {
            epoch: generator(seed, 7, int(epoch)).permutation(count) for epoch in np.unique(places // count)
        }
        return np.array([orders[place // count][place % count] for place in places])

    def inputs(self, batch: np.ndarray) -> Tokens:
        return query_inputs([self._ids[q] for q in batch], self._model.tokenizer, self._model.lengths)

    def texts(self, batch: np.ndarray) -> list[str]:
        return [self._questions[q].question for q in batch]

    def holds(self, batch: np.ndarray, number_BN: np.ndarray) -> np.ndarray:
        """Whether each retrieved passage contains an answer -> [B, N] bool."""
        self._load(number_BN.ravel())
        return np.array(
            [[self._has(int(q), int(n)) for n in row] for q, row in zip(batch, number_BN, strict=True)]
        )

    def choose(
        self,
        batch: np.ndarray,
        number_BN: np.ndarray,
        holds_BN: np.ndarray,
        contrast: bool,
        without_B: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Reorders the retrieved passages, so that the passages to read come first -> `number_BN` and `holds_BN`, reordered.

        If `without_B` is True for a question, the passages without an answer come first. Otherwise the order changes only with
        `contrast`: a positive comes first, then the passages without an answer. If the question file names the document of the
        question, the positive is from this document (except for made questions); a positive that was not retrieved replaces the
        last passage.
        """
        number_BN, holds_BN = number_BN.copy(), holds_BN.copy()
        for row, question in enumerate(batch.tolist()):
            number_N, holds_N = number_BN[row], holds_BN[row]
            first = np.zeros(0, dtype=np.int64)
            if contrast and not without_B[row]:
                own = self._own(question)
                if own is not None and own not in number_N:
                    number_N[-1], holds_N[-1] = own, True
                first = np.flatnonzero(holds_N if own is None else number_N == own)[:1]
            # The order is: `first`, passages without an answer, positives, missing passages.
            if len(first) or without_B[row]:
                missing_N = number_N == NULL_PASSAGE
                rest = (~holds_N & ~missing_N, holds_N, missing_N)
                order = np.concatenate([first, *map(np.flatnonzero, rest)])
                order = order[np.sort(np.unique(order, return_index=True)[1])]
                number_BN[row], holds_BN[row] = number_N[order], holds_N[order]
        return number_BN, holds_BN

    def _own(self, question: int) -> int | None:
        """The first passage that contains an answer, from the document that the question file names; None if there is none.

        It is also None for questions that `realm questions` has made, whose positives are always retrieved passages.
        """
        named = self._questions[question]
        if not named.document_id or named.passage_id:
            return None
        numbers = self._by_document.all(key_of(named.document_id))
        self._load(numbers)
        return next((int(n) for n in numbers if self._has(question, int(n))), None)

    def vectors(self, number_BK: np.ndarray) -> tuple[Tensor, Tensor]:
        """Vectors of the distinct passages, with gradient [U, D], and for each passage the row of its vector [B, K]."""
        model, tokens = self._model, self._kb.tokens
        distinct, place = np.unique(number_BK, return_inverse=True)
        inputs = passage_inputs(
            [tokens.title.row(n) for n in distinct],
            [tokens.body.row(n) for n in distinct],
            model.tokenizer,
            model.lengths,
        )
        passage_UD = model.embedder.passage(inputs.to(model.device))
        return passage_UD, torch.from_numpy(place.reshape(number_BK.shape)).to(model.device)

    def rows(self, reader: SpanReader, batch: np.ndarray, number_BK: np.ndarray) -> Rows:
        """The rows of a batch of questions with their passages, on the CPU."""
        model = self._model
        self._load(number_BK.ravel())
        texts = ["" if n == NULL_PASSAGE else self._passages[int(n)].text for n in number_BK.ravel()]
        encodings = model.tokenizer.encode_with_offsets(texts)
        owner = np.repeat(batch, number_BK.shape[1])
        tokens = reading_inputs(
            [self._ids[q] for q in owner], [e.ids for e in encodings], model.tokenizer, model.lengths
        )
        spans = [
            answer_pieces(self._questions[q], self._answer_ids[q], text, encoding, reader.config.max_width)
            for q, text, encoding in zip(owner, texts, encodings, strict=True)
        ]
        starts = [body_start(self._ids[q], model.lengths) for q in owner]
        length = tokens.ids_BT.shape[1]
        shape = (len(owner), min(reader.config.max_width, length), length)
        correct_RWT = correct_mask(spans, starts, shape)
        return Rows(tokens, body_mask(tokens, model.tokenizer.sep_id), correct_RWT, len(batch))

    def _load(self, numbers: np.ndarray) -> None:
        """Reads passages into memory, and removes the passages that were not used for the longest time (`PASSAGES_KEPT`)."""
        asked = np.unique(numbers[numbers != NULL_PASSAGE]).tolist()
        new = [n for n in asked if n not in self._passages]
        found = dict(zip(new, self._kb.passages(new), strict=True))
        for number in asked:  # the dictionary is ordered by the last use of each passage
            self._passages[number] = found[number] if number in found else self._passages.pop(number)
        for number in list(self._passages)[: -max(PASSAGES_KEPT, len(asked))]:
            del self._passages[number]

    def _has(self, question: int, number: int) -> bool:
        return number != NULL_PASSAGE and has_answer(
            self._passages[number].text, self._questions[question], self._contains
        )
