"""DrQA (Chen et al. 2017): TF-IDF over articles, and a bidirectional LSTM that reads every passage of the best articles.

The input of the reader has three parts for each word of a passage: the embedding of the word, three features, and the mean of
the embeddings of the question words, weighted by attention. The features are: whether the question contains the word as
written, whether the question contains the word if case is ignored, and the frequency of the word in the passage.

Bilinear forms of the states of the passage and the question give the scores of the start and the end of the answer. These
scores are not normalised, so that spans of different passages can be compared. The score of the article is not used.

Axis letters: B rows, T passage words, J question words, E embedding, F features of a word, H states, K retrieved passages.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from realm.errors import InputError
from realm.files import read_json, write_json
from realm.keys import Lookup, key_of
from realm.model.device import DeviceConfig, Precision, autocast, choose_device, multiplies_bf16
from realm.model.modes import evaluating
from realm.progress import progress
from realm.qa.predictions import DEPTH
from realm.qa.question_files import Question, compiled
from realm.qa.spans import span_scores
from realm.store.knowledge_base import KnowledgeBase
from realm.systems.system import Best, Found, Ground, ReadingSet, SystemModel, load_weights, read_system
from realm.systems.tfidf import Ranking, Token, ngrams, tokens_of
from realm.text.corpus import Passage
from realm.train.loop import TrainRun
from realm.train.run_config import QuestionsRunConfig, generator

NAME = "drqa"
PAD, UNKNOWN = 0, 1
WORDS = "words.json"
READ_AT_ONCE = 64
"""Number of passages per forward pass."""
SHORTEST, LONGEST = 25, 1500
"""Smallest and largest number of characters of a passage of distant supervision (published: 25 and 1500)."""
ARTICLES = 5
"""Number of articles that are read for a question (published: 5)."""
MATCHES = 5
"""Largest number of passages per training question (published: 5)."""
VOCABULARY = 30_000
"""Largest number of words in the vocabulary, which has the most frequent words of training passages and questions."""
ANSWER_WORDS = 15
"""Largest number of words of an answer (published: 15)."""
WINDOW = 20
"""Number of words on each side of an answer that are compared with the words of the question (published: 20)."""


@dataclass(frozen=True)
class Config(QuestionsRunConfig):
    """Settings of `realm baseline drqa` (published: GloVe vectors of width 300, Adamax, dropout 0.4)."""

    steps: int = 2000
    """Optimizer steps."""
    batch_size: int = 32
    """Pairs of a question and a passage per step (published: 32)."""
    learning_rate: float = 2e-3
    """Peak learning rate (published: 2e-3)."""
    width: int = 128
    """Width of the word embeddings, which are trained (published: GloVe vectors of width 300, mostly fixed)."""
    hidden: int = 128
    """Width of the LSTM states in each direction (published: 128)."""
    layers: int = 3
    """Number of layers of both LSTMs; the states of all layers are concatenated (published: 3)."""
    dev_questions: int = 200


class Vocabulary:
    """Words in lower case, and their numbers."""

    def __init__(self, words: Sequence[str]):
        self._words = list(words)
        self._number = {word: number for number, word in enumerate(words, start=2)}

    @classmethod
    def of(cls, texts: Iterator[list[Token]]) -> "Vocabulary":
        """The vocabulary with the most frequent words of tokenized texts."""
        counts = Counter(token.text.lower() for tokens in texts for token in tokens)
        ranked = sorted(counts.items(), key=lambda one: (-one[1], one[0]))
        return cls([word for word, _ in ranked[:VOCABULARY]])

    def __len__(self) -> int:
        return len(self._words) + 2

    def numbers(self, tokens: Sequence[Token]) -> list[int]:
        return [self._number.get(token.text.lower(), UNKNOWN) for token in tokens]

    def save(self, folder: Path) -> None:
        write_json(folder / WORDS, self._words)

    @classmethod
    def load(cls, folder: Path) -> "Vocabulary":
        return cls(read_json(folder / WORDS))


class Rows(NamedTuple):
    """Word numbers of pairs of a question and a passage, padded with `PAD`."""

    question_BJ: Tensor
    passage_BT: Tensor
    feature_BTF: Tensor
    """Whether the question contains the word as written; whether the question contains the word if upper and lower case are
    not distinguished; share of this word among the words of the passage."""

    def to(self, device: torch.device) -> "Rows":
        return Rows(*(part.to(device) for part in self))


def rows_of(pairs: Sequence[tuple[Sequence[Token], Sequence[Token]]], vocabulary: Vocabulary) -> Rows:
    """Tensors of pairs of a tokenized question and a tokenized passage."""
    questions = [vocabulary.numbers(question) or [UNKNOWN] for question, _ in pairs]
    passages = [vocabulary.numbers(passage) or [UNKNOWN] for _, passage in pairs]
    question_BJ = torch.zeros(len(pairs), max(map(len, questions)), dtype=torch.int64)
    passage_BT = torch.zeros(len(pairs), max(map(len, passages)), dtype=torch.int64)
    feature_BTF = torch.zeros(*passage_BT.shape, 3)
    for row, (question, passage) in enumerate(pairs):
        question_BJ[row, : len(questions[row])] = torch.tensor(questions[row])
        passage_BT[row, : len(passages[row])] = torch.tensor(passages[row])
        written = {token.text for token in question}
        lower = {token.text.lower() for token in question}
        words = [token.text.lower() for token in passage]
        counts = Counter(words)
        features = [
            (token.text in written, word in lower, counts[word] / len(words))
            for token, word in zip(passage, words, strict=True)
        ]
        feature_BTF[row, : len(words)] = torch.tensor(features, dtype=torch.float32).view(-1, 3)
    return Rows(question_BJ, passage_BT, feature_BTF)


class StackedLstm(nn.Module):
    """Several layers of bidirectional LSTMs. The output is the concatenation of the states of all layers."""

    def __init__(self, width: int, hidden: int, layers: int):
        super().__init__()
        sizes = [width, *[2 * hidden] * (layers - 1)]
        self.layers = nn.ModuleList(
            nn.LSTM(size, hidden, batch_first=True, bidirectional=True) for size in sizes
        )
        self.dropout = nn.Dropout(0.0)

    def forward(self, input_BTE: Tensor, mask_BT: Tensor) -> Tensor:
        """States -> [B, T, 2 * layers * hidden]; the states of padding are 0.

        On a CPU without bf16 instructions, the LSTMs are in float32, because torch has no bf16 LSTM for such a CPU.
        """
        lengths = mask_BT.sum(dim=1).cpu()
        states, found = input_BTE, []
        device = input_BTE.device.type
        with nullcontext() if multiplies_bf16(device) else torch.autocast(device, enabled=False):
            for layer in self.layers:
                packed = pack_padded_sequence(
                    self.dropout(states), lengths, batch_first=True, enforce_sorted=False
                )
                output, _ = layer(packed)
                states, _ = pad_packed_sequence(output, batch_first=True, total_length=mask_BT.shape[1])
                found.append(states)
        return torch.cat(found, dim=2)


class Reader(nn.Module):
    """A network that scores the words of a passage as first word and as last word of the answer."""

    def __init__(self, words: int, width: int, hidden: int, layers: int):
        super().__init__()
        self.embedding = nn.Embedding(words, width, padding_idx=PAD)
        self.align = nn.Linear(width, width)
        self.passage = StackedLstm(2 * width + 3, hidden, layers)
        self.question = StackedLstm(width, hidden, layers)
        states = 2 * layers * hidden
        self.weigh = nn.Linear(states, 1)
        self.start = nn.Linear(states, states)
        self.end = nn.Linear(states, states)
        self.dropout = nn.Dropout(0.0)

    def asked(self, question_BJE: Tensor, there_BJ: Tensor) -> Tensor:
        """The mean of the states of the question words, weighted by attention -> [B, H]."""
        question_BJH = self.question(question_BJE, there_BJ)
        weight_BJ = self.weigh(question_BJH).squeeze(2).masked_fill(~there_BJ, -torch.inf).softmax(dim=1)
        return (weight_BJ[:, None] @ question_BJH).squeeze(1)

    def forward(self, rows: Rows, question_BH: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Scores of starts, and scores of ends; -inf at padding -> two tensors [B, T] float32.

        `question_BH` has the vectors of the questions (`asked`); they are computed if they are not given.
        """
        there_BJ, there_BT = rows.question_BJ != PAD, rows.passage_BT != PAD
        question_BJE = self.dropout(self.embedding(rows.question_BJ))
        passage_BTE = self.dropout(self.embedding(rows.passage_BT))
        keys_BJE, asked_BTE = F.relu(self.align(question_BJE)), F.relu(self.align(passage_BTE))
        match_BTJ = (asked_BTE @ keys_BJE.transpose(1, 2)).masked_fill(~there_BJ[:, None], -torch.inf)
        aligned_BTE = match_BTJ.softmax(dim=2) @ question_BJE
        passage_BTH = self.passage(torch.cat([passage_BTE, aligned_BTE, rows.feature_BTF], dim=2), there_BT)
        if question_BH is None:
            question_BH = self.asked(question_BJE, there_BJ)
        start_BT, end_BT = (
            (passage_BTH @ form(question_BH)[:, :, None])
            .squeeze(2)
            .float()
            .masked_fill(~there_BT, -torch.inf)
            for form in (self.start, self.end)
        )
        return start_BT, end_BT


def best_spans(start_BT: Tensor, end_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """First word, last word and sum of scores of the span with the highest sum, per row -> three tensors [B].

    Spans have at most `ANSWER_WORDS` words. Of spans with equal scores, the shortest is taken.
    """
    score_B, place_B = span_scores(start_BT, end_BT, ANSWER_WORDS).flatten(1).max(dim=1)
    words = start_BT.shape[1]
    first_B = place_B % words
    return first_B, first_B + place_B // words, score_B


class Span(NamedTuple):
    """The best span of a passage: characters [start, end), and the score, which is -inf if the passage has no words."""

    start: int = 0
    end: int = 0
    score: float = -np.inf


class Example(NamedTuple):
    """A question, and a passage that contains an answer from word `first` to word `last`."""

    question: list[Token]
    passage: list[Token]
    first: int
    last: int


def occurrences(question: Question, text: str, tokens: Sequence[Token]) -> list[tuple[int, int]]:
    """First and last word of each occurrence of an answer in a text.

    Answers are compared as whole words, and in lower case. A match of a regular expression has every word that it touches.
    """
    found = set()
    if question.regex:
        for pattern in question.answers:
            for match in compiled(pattern).finditer(text):
                inside = [
                    n for n, one in enumerate(tokens) if one.start < match.end() and one.end > match.start()
                ]
                if inside:
                    found.add((inside[0], inside[-1]))
    words = [token.text.lower() for token in tokens]
    for answer in () if question.regex else question.answers:
        wanted = [token.text.lower() for token in tokens_of(answer)]
        for first in range(len(words) - len(wanted) + 1):
            if wanted and words[first : first + len(wanted)] == wanted:
                found.add((first, first + len(wanted) - 1))
    return sorted(found)


def examples_in(question: Question, passage: Passage) -> list[tuple[int, Example]]:
    """The training example of each occurrence of an answer in a passage, with its overlap.

    The overlap is the number of unigrams and bigrams (`ngrams`) that the question shares with the answer and the `WINDOW` words
    on each side of the answer.
    """
    asked, wanted = tokens_of(question.question), Counter(ngrams(question.question))
    tokens, found = tokens_of(passage.text), []
    for first, last in occurrences(question, passage.text, tokens):
        window = tokens[max(0, first - WINDOW) : last + 1 + WINDOW]
        around = Counter(ngrams(passage.text[window[0].start : window[-1].end]))
        found.append(((around & wanted).total(), Example(asked, tokens, first, last)))
    return found


def example_of(question: Question, passage: Passage) -> tuple[int, Example] | None:
    """The example of distant supervision from a passage, with its overlap: the example with the largest overlap.

    None if the passage contains no answer of at most `ANSWER_WORDS` words, if every overlap is 0, or if the passage has fewer
    than `SHORTEST` or more than `LONGEST` characters.
    """
    if not SHORTEST <= len(passage.text) <= LONGEST:
        return None
    return _best(
        (overlap, example)
        for overlap, example in examples_in(question, passage)
        if overlap and example.last - example.first < ANSWER_WORDS
    )


def _best(found: Iterable[tuple[int, Example]]) -> tuple[int, Example] | None:
    """Of the examples with the largest overlap, the first."""
    return max(found, key=lambda one: one[0], default=None)


def examples_of(kb: KnowledgeBase, ranking: Ranking, questions: Sequence[Question]) -> list[Example]:
    """Training examples by distant supervision: passages of the best articles that contain an answer.

    For each question, passages are ordered by overlap (`examples_in`), and the first `MATCHES` passages are used. In the
    publication, the passages also contain all named entities of the question.

    Raises:
        InputError: no passage of the best articles contains an answer.
    """
    examples = []
    for question in progress(questions, total=len(questions), description="find answers", unit="question"):
        numbers = ranking.passages(question.question, ARTICLES)
        found = [example_of(question, passage) for passage in kb.passages(numbers)]
        best = sorted((one for one in found if one is not None), key=lambda one: -one[0])
        examples += [example for _, example in best[:MATCHES]]
    if not examples:
        raise InputError(
            f"no training question has an answer in the {ARTICLES} best articles for the question"
        )
    return examples


def examples_of_documents(reading: ReadingSet) -> list[Example]:
    """For each question, the training example with the largest overlap from the document that the question names.

    The published reader is trained on all questions of SQuAD, together with the examples of distant supervision. There, the
    place of the answer is annotated. A question whose document does not contain an answer has no example.

    Raises:
        InputError: no question has an example.
    """
    by_document, examples = Lookup(reading.kb.document_keys_N), list[Example]()
    for question in progress(
        reading.questions, total=len(reading.questions), description="find answers", unit="question"
    ):
        passages = reading.kb.passages(by_document.all(key_of(question.document_id)))
        found = _best(one for passage in passages for one in examples_in(question, passage))
        if found is not None:
            examples.append(found[1])
    if not examples:
        raise InputError("no question names a document with a passage that contains an answer")
    return examples


def loss_of(reader: Reader, rows: Rows, first_B: Tensor, last_B: Tensor) -> Tensor:
    """Mean negative log-likelihood of the first word plus that of the last word."""
    start_BT, end_BT = reader(rows)
    return F.cross_entropy(start_BT, first_B) + F.cross_entropy(end_BT, last_B)


def train(ground: Ground, out: Path, config: Config) -> Path:
    """Trains the reader on passages that contain answers -> `out`. The TF-IDF matrix is stored in the folder `out`.tfidf.

    Raises:
        InputError: no training question has an answer in the best articles for the question.
    """
    kb, ranking = ground.kb, Ranking.open(ground.kb, out)
    examples = examples_of(kb, ranking, ground.train)
    if ground.reading is not None:
        examples += examples_of_documents(ground.reading)
    vocabulary = Vocabulary.of(side for one in examples for side in (one.question, one.passage))
    torch.manual_seed(config.seed)
    sizes = (len(vocabulary), config.width, config.hidden, config.layers)
    reader = Reader(*sizes)
    model = SystemModel(NAME, reader, {"reader": sizes}, vocabulary)
    with TrainRun(NAME, out, config, model, {reader: config.learning_rate}, ground.given()) as run:
        system = DrQa(kb, ranking, reader, vocabulary, config.precision)
        best = Best(run, reader, ground.dev[: config.dev_questions], system)
        for step in run.steps():
            drawn = generator(config.seed, step).integers(len(examples), size=config.batch_size)
            batch = [examples[place] for place in drawn.tolist()]
            rows = rows_of([(one.question, one.passage) for one in batch], vocabulary).to(run.device)
            first_B, last_B = (
                torch.tensor([getattr(one, end) for one in batch]) for end in ("first", "last")
            )
            with run.autocast():
                loss = loss_of(reader, rows, first_B.to(run.device), last_B.to(run.device))
            run.update(loss, {})
            if run.step % config.dev_every == 0 or run.step == config.steps:
                best.evaluate()
        best.restore()
        return run.finish()


class DrQa:
    """The trained system, which reads all passages of the best articles."""

    def __init__(
        self,
        kb: KnowledgeBase,
        ranking: Ranking,
        reader: Reader,
        vocabulary: Vocabulary,
        precision: Precision = "fp32",
    ):
        self._kb, self._ranking, self._reader, self._vocabulary = kb, ranking, reader, vocabulary
        self._precision = precision

    @torch.no_grad()
    def answer(self, questions: Sequence[str]) -> list[Found]:
        """For each question, the span with the highest score. The retrieved passages are ordered by the rank of their article,
        then by position in the article."""
        if not questions:
            return []
        articles = self._ranking.articles
        ranked = [self._ranking.best(question, DEPTH) for question in questions]
        read = [articles.passages(documents[:ARTICLES]) for documents in ranked]
        passages = self._kb.passages([number for numbers in read for number in numbers.tolist()])
        asked = [row for row, numbers in enumerate(read) for _ in numbers]
        spans = self._best_spans(questions, asked, [passage.text for passage in passages])
        answers, end = [], 0
        for documents, numbers in zip(ranked, read, strict=True):
            here = range(end, end := end + len(numbers))
            found = Found("", 0.0, number_K=articles.passages(documents)[:DEPTH], read=len(numbers))
            # Of equal scores, the first is kept.
            best = max(here, key=lambda one: spans[one].score, default=None)
            if best is not None and spans[best].score > -np.inf:
                start, last, score = spans[best]
                number = int(numbers[best - here.start])
                found = found._replace(
                    answer=passages[best].text[start:last], score=score, passage=number, start=start, end=last
                )
            answers.append(found)
        return answers

    def _best_spans(
        self, questions: Sequence[str], asked_R: Sequence[int], text_R: Sequence[str]
    ) -> list[Span]:
        """The span with the highest score of each text. `asked_R` has the positions in `questions` of their questions.

        The texts of a forward pass have the same number of words, because an LSTM is much faster without padding.
        """
        question_tokens = [tokens_of(question) for question in questions]
        tokens_R = [tokens_of(text) for text in text_R]
        rows_of_length: dict[int, list[int]] = defaultdict(list)
        for row, tokens in enumerate(tokens_R):
            rows_of_length[len(tokens)].append(row)
        rows_of_length.pop(0, None)
        reader, spans = self._reader, [Span()] * len(text_R)
        device = reader.weigh.weight.device
        with evaluating(reader), autocast(device, self._precision):
            question_BJ = rows_of([(tokens, []) for tokens in question_tokens], self._vocabulary).question_BJ
            question_BJ = question_BJ.to(device)
            question_BH = reader.asked(reader.embedding(question_BJ), question_BJ != PAD)
            for same in rows_of_length.values():
                for first in range(0, len(same), READ_AT_ONCE):
                    part = same[first : first + READ_AT_ONCE]
                    asked = [asked_R[row] for row in part]
                    pairs = [
                        (question_tokens[one], tokens_R[row]) for one, row in zip(asked, part, strict=True)
                    ]
                    rows = rows_of(pairs, self._vocabulary).to(device)
                    found = best_spans(*reader(rows, question_BH[asked]))
                    for row, begin, last, score in zip(part, *(one.tolist() for one in found), strict=True):
                        tokens = tokens_R[row]
                        spans[row] = Span(tokens[begin].start, tokens[last].end, score)
        return spans


def load(folder: Path, kb: KnowledgeBase, config: DeviceConfig) -> DrQa:
    """The trained system. If the TF-IDF matrix is missing, or was made from other passages or documents, it is made again."""
    reader = Reader(*read_system(folder)["sizes"]["reader"])
    load_weights(reader, folder)
    reader.to(choose_device(config.device)).eval()
    return DrQa(kb, Ranking.open(kb, folder), reader, Vocabulary.load(folder), config.precision)
