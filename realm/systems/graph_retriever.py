"""GraphRetriever (Min et al. 2019): passages are retrieved along the edges of a graph, and read with their relations.

Retrieval starts from the best passages of BM25 and from the documents whose titles the question contains, and follows the edges
of `passage_graph`. The reader encodes each passage together with the question. Fusion layers combine the [CLS] states of
passages that have a relation. Then the reader scores the passages, and the start and the end of an answer within each passage:

    p(span) = softmax over passages * softmax over starts in the passage * softmax over ends in the passage

An answer starts and ends at the bounds of words (`answer_ends`). Training maximises the sum of p(span) over all occurrences of
an answer (distant supervision).

Axis letters: B questions, K passages of a question, R rows (question, passage), T tokens, H hidden.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from realm.errors import InputError
from realm.model.bert import Bert
from realm.model.device import DeviceConfig, Precision, autocast
from realm.model.folder import load_model
from realm.model.modes import evaluating
from realm.model.states import hidden_states
from realm.progress import progress
from realm.qa.predictions import DEPTH
from realm.qa.question_files import Question
from realm.qa.reading import Reading, joint_reading
from realm.qa.spans import body_start, pieces_of_answers
from realm.search.bm25 import highest
from realm.search.retriever import Retriever
from realm.store.knowledge_base import KnowledgeBase
from realm.systems.answer_ends import ANSWER_TOKENS, WHOLE_WORDS, AnswerEnds, answer_scores
from realm.systems.passage_graph import RELATIONS, PassageGraph
from realm.systems.system import (
    Best,
    EncoderSystemConfig,
    Found,
    Ground,
    SystemModel,
    load_network,
    start_encoder,
)
from realm.tokens.layouts import Lengths
from realm.tokens.tokenizer import Tokenizer
from realm.train.loop import TrainRun
from realm.train.run_config import generator

NAME = "graph"
HEAD_RATE = 1e-3
"""Peak learning rate of the fusion layers and of the layers that compute scores. These layers have random weights at first."""
SEEDS = 10
"""Number of passages of BM25 from which retrieval starts."""
HOPS = 2
"""Largest number of edges from a seed to a retrieved passage (published: 2)."""
TRAIN_PASSAGES = 8
"""Number of passages per training question: one passage with an answer, and the best of the other retrieved passages."""
FUSION_LAYERS = 2


@dataclass(frozen=True)
class Config(EncoderSystemConfig):
    """Settings of `realm baseline graph` (published: BERT-base, seeds from TF-IDF and TAGME, relations from Wikidata)."""

    passages: int = 20
    """Number of passages that are read for a question (published: 80 on Natural Questions)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.passages < SEEDS:
            raise ValueError(
                f"passages is {self.passages}: it must be {SEEDS} or more, because BM25 alone finds {SEEDS}"
            )


class Fusion(nn.Module):
    """A layer that updates the state of each passage with the elementwise maximum of messages from its neighbours.

    A message is computed from the state of the neighbour and from the relation to the neighbour.
    """

    def __init__(self, hidden: int):
        super().__init__()
        self.message = nn.Linear(2 * hidden, hidden)
        self.update = nn.Linear(2 * hidden, hidden)
        self.norm = nn.LayerNorm(hidden)

    def forward(self, state_BKH: Tensor, relation_BKKH: Tensor, linked_BKK: Tensor) -> Tensor:
        """New states -> [B, K, H]. Row k of the relations has the relations of passage k to all passages.

        If a passage has no neighbours, the maximum is 0.
        """
        other_BKKH = state_BKH[:, None].expand_as(relation_BKKH)
        message_BKKH = F.relu(self.message(torch.cat([other_BKKH, relation_BKKH], dim=3)))
        best_BKH = message_BKKH.masked_fill(~linked_BKK[..., None], 0.0).amax(dim=2)
        updated: Tensor = self.norm(state_BKH + self.update(torch.cat([state_BKH, best_BKH], dim=2)))
        return updated


class GraphReader(nn.Module):
    """A network that scores passages, and the first and last wordpieces of answers in each passage."""

    def __init__(self, encoder: Bert, tokenizer: Tokenizer):
        super().__init__()
        hidden = encoder.config.hidden_size
        self.encoder = encoder
        self.relation = nn.Embedding(RELATIONS, hidden)
        self.fusion = nn.ModuleList(Fusion(hidden) for _ in range(FUSION_LAYERS))
        self.select = nn.Linear(hidden, 1)
        self.ends = AnswerEnds(encoder.config, tokenizer)

    def heads(self) -> list[nn.Module]:
        """The layers that have random weights before training."""
        return [self.relation, self.fusion, self.select, self.ends]

    def forward(self, reading: Reading, relation_BKK: Tensor) -> tuple[Tensor, Tensor]:
        """log p(passage) [B, K], and log p(start) and log p(end) within each passage [2, R, T]; R = B K."""
        device = self.select.weight.device
        state_RTH = hidden_states(self.encoder, reading.tokens.to(device)).float()
        relation_BKK = relation_BKK.to(device)
        questions, most, _ = relation_BKK.shape
        state_BKH = state_RTH[:, 0].view(questions, most, -1)
        for layer in self.fusion:
            state_BKH = layer(state_BKH, self.relation(relation_BKK), relation_BKK > 0)
        passage_BK = self.select(state_BKH).squeeze(2).log_softmax(dim=1)
        return passage_BK, self.ends(state_RTH, reading)


def marginal_loss(
    passage_BK: Tensor, end_2RT: Tensor, places: Sequence[Sequence[tuple[int, int, int]]]
) -> Tensor:
    """Mean over questions of -log sum p(span), where the sum is over `places` (passage k, first token, last token)."""
    most, losses = passage_BK.shape[1], []
    for row, own in enumerate(places):
        k, first, last = (torch.tensor(part, device=passage_BK.device) for part in zip(*own, strict=True))
        logp = passage_BK[row, k] + end_2RT[0, row * most + k, first] + end_2RT[1, row * most + k, last]
        losses.append(-logp.logsumexp(dim=0))
    return torch.stack(losses).mean()


class Retrieval:
    """Retrieval of passages for questions: first the seeds, then the passages that the graph adds, ordered by BM25 score."""

    def __init__(self, kb: KnowledgeBase, graph: PassageGraph, passages: int):
        self._retriever, self._graph, self.read = Retriever(kb), graph, passages

    def ranking(self, question: str) -> tuple[list[int], list[int]]:
        """Two lists of passage numbers, best first: the passages to read; and the ranking of all passages, in which the other
        passages that BM25 finds follow the passages to read."""
        (score_N,) = self._retriever.load_bm25().scores([question])
        found = highest(score_N, DEPTH).tolist()
        seeds = found[:SEEDS]
        seeds += [self._graph.articles.lead(one) for one in self._graph.titles.find(question, any_case=True)]
        seeds = list(dict.fromkeys(seeds))[: self.read]
        added = [one for one in self._graph.expand(seeds, HOPS, 10 * self.read) if one not in seeds]
        added.sort(key=lambda number: -score_N[number])
        chosen = [*seeds, *added][: self.read]
        return chosen, list(dict.fromkeys([*chosen, *found]))


class Example(NamedTuple):
    """A training question, its retrieved passages, and the places of answers in each passage.

    A place is the position of the first wordpiece in the body, and the number of further wordpieces.
    """

    question: str
    numbers: list[int]
    places: list[list[tuple[int, int]]]


def examples_of(
    kb: KnowledgeBase,
    retrieval: Retrieval,
    tokenizer: Tokenizer,
    lengths: Lengths,
    questions: Sequence[Question],
) -> list[Example]:
    """Examples for the questions that have an answer in the part of a retrieved passage that the reader reads.

    Raises:
        InputError: no question has such an answer.
    """
    examples = []
    for question in progress(questions, total=len(questions), description="find answers", unit="question"):
        numbers, _ = retrieval.ranking(question.question)
        texts = [passage.text for passage in kb.passages(numbers)]
        (asked,) = tokenizer.encode([question.question])
        # The last wordpiece of a row is [SEP].
        room = (lengths.reading or lengths.joint) - 1 - body_start(asked, lengths)
        places = [
            [(first, width) for first, width in own if first + width < room]
            for own in pieces_of_answers(question, texts, tokenizer, ANSWER_TOKENS)
        ]
        if any(places):
            examples.append(Example(question.question, numbers, places))
    if not examples:
        raise InputError("no training question has an answer in the passages retrieved for the question")
    return examples


def chosen(example: Example, rng: np.random.Generator) -> list[int]:
    """Positions in `numbers` of the passages to train on: a random passage with an answer, then the best other passages."""
    held = [place for place, spans in enumerate(example.places) if spans]
    first = held[int(rng.integers(len(held)))]
    return [first, *(place for place in range(len(example.numbers)) if place != first)][:TRAIN_PASSAGES]


def train(ground: Ground, out: Path, config: Config) -> Path:
    """Trains the reader on retrieved passages -> `out`.

    Raises:
        InputError: no training question has an answer that the reader reads in the passages retrieved for the question.
    """
    kb, start = ground.kb, load_model(ground.encoder)
    kb.check_tokenizer(start.tokenizer, ground.encoder)
    graph = PassageGraph.open(kb, out)
    retrieval = Retrieval(kb, graph, config.passages)
    examples = examples_of(kb, retrieval, start.tokenizer, start.lengths, ground.train)
    torch.manual_seed(config.seed)
    reader = GraphReader(start_encoder(start), start.tokenizer)
    sizes = {
        "encoder": asdict(reader.encoder.config),
        "lengths": asdict(start.lengths),
        "passages": config.passages,
    }
    model = SystemModel(NAME, reader, sizes, start.tokenizer)
    rates = {reader.encoder: config.learning_rate, **dict.fromkeys(reader.heads(), HEAD_RATE)}
    names = {**ground.given(), **WHOLE_WORDS, "init": ground.encoder}
    with TrainRun(NAME, out, config, model, rates, names) as run:
        system = GraphRetriever(
            kb, graph, retrieval, reader, start.tokenizer, start.lengths, config.precision
        )
        best = Best(run, reader, ground.dev[: config.dev_questions], system)
        for step in run.steps():
            rng = generator(config.seed, step)
            batch = [examples[int(place)] for place in rng.integers(len(examples), size=config.batch_size)]
            kept = [chosen(one, rng) for one in batch]
            most = min(map(len, kept))  # every question needs the same number of passages
            numbers = [
                [one.numbers[place] for place in own[:most]] for one, own in zip(batch, kept, strict=True)
            ]
            read = system.read([one.question for one in batch], numbers)
            places = [
                [
                    (k, read.starts[row * most + k] + first, read.starts[row * most + k] + first + width)
                    for k, place in enumerate(own[:most])
                    for first, width in one.places[place]
                ]
                for row, (one, own) in enumerate(zip(batch, kept, strict=True))
            ]
            with run.autocast():
                passage_BK, end_2RT = reader(read.reading, read.relation_BKK)
            run.update(marginal_loss(passage_BK, end_2RT, places), {})
            if run.step % config.dev_every == 0 or run.step == config.steps:
                best.evaluate()
        best.restore()
        return run.finish()


class Read(NamedTuple):
    """Inputs of the reader. Every question has the same number of passages."""

    reading: Reading
    texts: list[str]
    """The passage of each row."""
    relation_BKK: Tensor
    starts: list[int]
    """For each row, the position of the first wordpiece of the body."""


class GraphRetriever:
    """The trained system, which reads passages of BM25 and passages that the graph adds."""

    def __init__(
        self,
        kb: KnowledgeBase,
        graph: PassageGraph,
        retrieval: Retrieval,
        reader: GraphReader,
        tokenizer: Tokenizer,
        lengths: Lengths,
        precision: Precision = "fp32",
    ):
        self._kb, self._graph, self._retrieval, self._reader = kb, graph, retrieval, reader
        self._tokenizer, self._lengths, self._precision = tokenizer, lengths, precision

    def read(self, questions: Sequence[str], numbers: Sequence[Sequence[int]]) -> Read:
        """Inputs of the reader for questions and their passages. Every question has the same number of passages."""
        ids = self._tokenizer.encode(questions)
        asked = [one for one, own in zip(ids, numbers, strict=True) for _ in own]
        texts = [passage.text for own in numbers for passage in self._kb.passages(own)]
        reading = joint_reading(asked, texts, self._tokenizer, self._lengths)
        relation_BKK = torch.from_numpy(np.stack([self._graph.relations(own) for own in numbers]))
        return Read(reading, texts, relation_BKK, [body_start(one, self._lengths) for one in asked])

    def answer(self, questions: Sequence[str]) -> list[Found]:
        """The span with the highest score of each question. Retrieved passages are ranked before the other passages of BM25."""
        return [self._answer(question) for question in questions]

    @torch.no_grad()
    def _answer(self, question: str) -> Found:
        numbers, ranked = self._retrieval.ranking(question)
        if not numbers:
            return Found("", 0.0)
        reading, texts, relation_BKK, _ = self.read([question], [numbers])
        with evaluating(self._reader), autocast(self._reader.select.weight.device, self._precision):
            passage_BK, end_2RT = (part.cpu() for part in self._reader(reading, relation_BKK))
        score_RWT = passage_BK[0][:, None, None] + answer_scores(end_2RT, reading, texts)
        row, width, first = np.unravel_index(int(score_RWT.argmax()), score_RWT.shape)
        found = Found("", 0.0, number_K=ranked[:DEPTH], read=len(numbers))
        score = float(score_RWT[row, width, first])
        if score == -np.inf:  # no passage has a possible answer
            return found
        start, end = reading.text_span(int(row), int(first), int(first + width))
        return found._replace(
            answer=texts[row][start:end], score=score, passage=numbers[row], start=start, end=end
        )


def load(folder: Path, kb: KnowledgeBase, config: DeviceConfig) -> GraphRetriever:
    """The trained system. If the graph is missing, or if it was made from another knowledge base, it is made again."""
    network, tokenizer, lengths, sizes = load_network(folder, kb, config, GraphReader)
    graph = PassageGraph.open(kb, folder)
    retrieval = Retrieval(kb, graph, sizes["passages"])
    return GraphRetriever(kb, graph, retrieval, network, tokenizer, lengths, config.precision)
