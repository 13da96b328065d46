"""PathRetriever (Asai et al. 2020): a recurrent network follows links from passage to passage, and a reader ranks the paths.

A passage is encoded together with the question: w = BERT([question, passage])[CLS]. A path has a state h. The probability that
a candidate is the next passage of the path is sigmoid(w . h + b). After a passage was picked, the state becomes W [h; w] + c,
scaled to a learned length. The end of a path is a candidate with a learned vector instead of w. The first candidates are the
best passages of BM25. Later candidates are the first passages of the documents that the last picked passage names
(`passage_graph`), and the two best candidates of the previous step. The probability of a path is the product of the
probabilities of its steps. Beam search keeps the best paths. The reader encodes the passages of a path together, and predicts
whether the path contains an answer, and the position of the answer.

Axis letters: K passages of a question, R paths, T tokens, H hidden.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from realm.errors import InputError
from realm.model.device import DeviceConfig, Precision, autocast
from realm.model.folder import load_model
from realm.model.modes import evaluating
from realm.progress import progress
from realm.qa.predictions import DEPTH
from realm.qa.question_files import Question
from realm.qa.reading import Reading, joint_reading
from realm.qa.spans import PARAGRAPH_END, body_start, pieces_of_answers
from realm.search.retriever import Retriever
from realm.store.knowledge_base import KnowledgeBase
from realm.systems.answer_ends import ANSWER_TOKENS, WHOLE_WORDS, answer_scores
from realm.systems.passage_graph import PassageGraph
from realm.systems.path_network import END, PathNetwork, beam_search, path_loss, reading_loss
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

NAME = "path"
HEAD_RATE = 1e-3
"""Peak learning rate of the recurrent layer and of the layers that compute scores, which have random weights at first."""
SEEDS = 10
"""Number of passages of BM25 with which a path can begin (published: up to 500 passages of TF-IDF)."""
NEGATIVES = 6
"""Negatives of a training path are passages without an answer. There are two kinds, passages of BM25 and passages to which the
path links; this is the largest number of each kind (published: 50 of both kinds together)."""
PASSAGES = 2
"""Largest number of passages of a path."""
BEAM = 4
"""Number of paths that beam search keeps (published: 8)."""
SEPARATOR = PARAGRAPH_END
"""Text between two passages of a path in the input of the reader. No answer extends over it."""


@dataclass(frozen=True)
class Config(EncoderSystemConfig):
    """Settings of `realm baseline path` (published: BERT-base as retriever, BERT-large as reader, links from hyperlinks, rate
    3e-5)."""


class Example(NamedTuple):
    """A training question with passages and paths.

    `numbers` are the passages. `held` has the positions in `numbers` of the passages that contain an answer. A path has
    the positions of its passages in `numbers`; the last passage contains an answer, and `END` follows.
    """

    question: Question
    numbers: list[int]
    held: set[int]
    paths: list[list[int]]


def examples_of(
    kb: KnowledgeBase, graph: PassageGraph, tokenizer: Tokenizer, questions: Sequence[Question]
) -> list[Example]:
    """Examples for the questions that have an answer in the best passages of BM25.

    A path is a passage with an answer, or a passage without an answer and a passage with an answer to which it links.

    Raises:
        InputError: no question has an answer in the best passages of BM25.
    """
    examples, retriever = [], Retriever(kb)
    for question in progress(questions, total=len(questions), description="find answers", unit="question"):
        _, number_BK = retriever.search([question.question], SEEDS, "bm25", None)
        numbers = [int(number) for number in number_BK[0] if number >= 0]
        held = {place for place, spans in enumerate(_spans(kb, tokenizer, question, numbers)) if spans}
        paths = [[place, END] for place in sorted(held)]
        paths += [
            [before, place, END]
            for before, number in enumerate(numbers)
            if before not in held
            for place in sorted(held)
            if numbers[place] in links_of(graph, number)
        ]
        if held:
            examples.append(Example(question, numbers, held, paths))
    if not examples:
        raise InputError("no training question has an answer in the best passages of BM25 for the question")
    return examples


def links_of(graph: PassageGraph, passage: int) -> list[int]:
    """First passages of the documents that a passage names."""
    return [graph.articles.lead(document) for document in graph.named(passage)]


def _spans(
    kb: KnowledgeBase, tokenizer: Tokenizer, question: Question, numbers: Sequence[int]
) -> list[list[tuple[int, int]]]:
    texts = [passage.text for passage in kb.passages(numbers)]
    return pieces_of_answers(question, texts, tokenizer, ANSWER_TOKENS)


def train(ground: Ground, out: Path, config: Config) -> Path:
    """Trains the retriever and the reader together -> `out`.

    Raises:
        InputError: no training question has an answer in the best passages of BM25 for the question.
    """
    kb, start = ground.kb, load_model(ground.encoder)
    kb.check_tokenizer(start.tokenizer, ground.encoder)
    graph = PassageGraph.open(kb, out)
    examples = examples_of(kb, graph, start.tokenizer, ground.train)
    torch.manual_seed(config.seed)
    network = PathNetwork(start_encoder(start), start.tokenizer)
    sizes = {"encoder": asdict(network.encoder.config), "lengths": asdict(start.lengths)}
    model = SystemModel(NAME, network, sizes, start.tokenizer)
    heads = nn.ModuleList([network.step, network.holds, network.ends])
    vectors = nn.ParameterList([network.begin, network.end, network.length, network.bias])
    rates: dict[nn.Module, float] = dict.fromkeys((network.encoder, network.reader), config.learning_rate)
    rates |= dict.fromkeys((heads, vectors), HEAD_RATE)
    names = {**ground.given(), **WHOLE_WORDS, "init": ground.encoder}
    with TrainRun(NAME, out, config, model, rates, names) as run:
        system = PathRetriever(kb, graph, network, start.tokenizer, start.lengths, config.precision)
        best = Best(run, network, ground.dev[: config.dev_questions], system)
        for step in run.steps():
            rng = generator(config.seed, step)
            losses = []
            with run.autocast():
                for place in rng.integers(len(examples), size=config.batch_size):
                    losses.append(system.loss(examples[int(place)], rng))
            run.update(torch.stack(losses).mean(), {})
            if run.step % config.dev_every == 0 or run.step == config.steps:
                best.evaluate()
        best.restore()
        return run.finish()


class PathRetriever:
    """The trained system, which answers from the path that the reader ranks first."""

    def __init__(
        self,
        kb: KnowledgeBase,
        graph: PassageGraph,
        network: PathNetwork,
        tokenizer: Tokenizer,
        lengths: Lengths,
        precision: Precision = "fp32",
    ):
        self._kb, self._graph, self._network, self._tokenizer = kb, graph, network, tokenizer
        self._lengths, self._precision, self._retriever = lengths, precision, Retriever(kb)
        positions = network.encoder.config.max_position_embeddings
        together = min(positions, lengths.query + PASSAGES * (lengths.passage - 1))
        self._long = replace(lengths, reading=max(together, lengths.joint))

    def _inputs(self, question: str, texts: Sequence[str], lengths: Lengths) -> Reading:
        (ids,) = self._tokenizer.encode([question])
        return joint_reading([ids] * len(texts), texts, self._tokenizer, lengths)

    def _encode(self, question: str, numbers: Sequence[int]) -> Tensor:
        texts = [passage.text for passage in self._kb.passages(numbers)]
        return self._network.encoded(self._inputs(question, texts, self._lengths))

    def linked_negatives(self, example: Example, path: Sequence[int]) -> list[int]:
        """Passages without an answer to which a path links, except passages that BM25 found."""
        links = [one for place in path for one in links_of(self._graph, example.numbers[place])]
        others = [one for one in dict.fromkeys(links) if one not in example.numbers]
        spans = _spans(self._kb, self._tokenizer, example.question, others)
        return [one for one, held in zip(others, spans, strict=True) if not held]

    def loss(self, example: Example, rng: np.random.Generator) -> Tensor:
        """Loss of the retriever on a random path of a question, plus loss of the reader on this path and on a negative."""
        question = example.question
        path = example.paths[int(rng.integers(len(example.paths)))][:-1]
        wrong = [
            place for place in range(len(example.numbers)) if place not in example.held and place not in path
        ]
        kept = [*path, *rng.permutation(wrong)[:NEGATIVES].tolist()]
        linked = rng.permutation(self.linked_negatives(example, path))[:NEGATIVES].astype(int).tolist()
        numbers = [*(example.numbers[place] for place in kept), *linked]
        passage_KH = self._encode(question.question, numbers)
        allowed = [*(place not in example.held for place in kept), *(True for _ in linked)]
        allowed_K = torch.tensor(allowed, device=passage_KH.device)
        retrieval = path_loss(self._network, passage_KH, [*range(len(path)), END], allowed_K)
        read = [numbers[: len(path)], *([one] for one in numbers[len(path) :][:1])]
        texts = [self._text(own) for own in read]
        reading = self._inputs(question.question, texts, self._long)
        begin = body_start(self._tokenizer.encode([question.question])[0], self._lengths)
        longest = reading.tokens.ids_BT.shape[1]
        places = [
            [
                (begin + first, begin + first + width)
                for first, width in found
                if begin + first + width < longest - 1
            ]
            for found in pieces_of_answers(question, texts, self._tokenizer, ANSWER_TOKENS)
        ]
        holds_R, end_2RT = self._network.read(reading)
        return retrieval + reading_loss(holds_R, end_2RT, places)

    def _text(self, numbers: Sequence[int]) -> str:
        return SEPARATOR.join(passage.text for passage in self._kb.passages(numbers))

    def answer(self, questions: Sequence[str]) -> list[Found]:
        """The best span in the best path of each question. The passages of paths precede the other passages of BM25."""
        return [self._answer(question) for question in questions]

    @torch.no_grad()
    def _answer(self, question: str) -> Found:
        network = self._network
        _, number_BK = self._retriever.search([question], DEPTH, "bm25", None)
        ranked = [int(number) for number in number_BK[0] if number >= 0]
        if not ranked:
            return Found("", 0.0)
        with evaluating(network), autocast(network.bias.device, self._precision):
            beams = beam_search(
                network, ranked[:SEEDS], lambda pick: links_of(self._graph, pick),
                lambda numbers: self._encode(question, numbers), PASSAGES, BEAM,
            )  # fmt: skip
            texts = [self._text(one.path) for one in beams]
            reading = self._inputs(question, texts, self._long)
            holds_R, end_2RT = (part.cpu() for part in network.read(reading))
        row = int(holds_R.argmax())
        path = beams[row].path
        score_WT = answer_scores(end_2RT, reading, texts)[row]
        width, first = divmod(int(score_WT.argmax()), score_WT.shape[1])
        number_K = list(dict.fromkeys([*(number for one in beams for number in one.path), *ranked]))[:DEPTH]
        found = Found("", 0.0, number_K=number_K, read=len({number for one in beams for number in one.path}))
        score = float(score_WT[width, first])
        if score == -np.inf:  # the path has no possible answer
            return found
        start, end = reading.text_span(row, first, first + width)
        lengths = [len(passage.text) for passage in self._kb.passages(path)]
        begins = np.cumsum([0, *(length + len(SEPARATOR) for length in lengths)])
        place = int(np.searchsorted(begins, start, side="right")) - 1
        return found._replace(
            answer=texts[row][start:end],
            score=score + float(F.logsigmoid(holds_R[row])),
            passage=path[place],
            start=start - int(begins[place]),
            end=end - int(begins[place]),
        )


def load(folder: Path, kb: KnowledgeBase, config: DeviceConfig) -> PathRetriever:
    """The trained system. If the graph is missing, or if it was made from another knowledge base, it is made again."""
    network, tokenizer, lengths, _ = load_network(folder, kb, config, PathNetwork)
    graph = PassageGraph.open(kb, folder)
    return PathRetriever(kb, graph, network, tokenizer, lengths, config.precision)
