"""T5 closed-book (Roberts et al. 2020): an encoder-decoder answers from its weights alone, without retrieval.

It first learns from the text of the knowledge base: a salient span of a sentence is replaced by a sentinel, and the decoder
predicts the span. Then it trains on questions and answers. A published checkpoint, which has read more text, can be the start.

    input   sentence with [MASK] in place of a name or date, or a question      target   the span, or an answer

Axis letters: B examples, T input tokens, M target tokens, V vocabulary.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from realm.errors import InputError, first_line
from realm.hub import from_hub
from realm.masking.held_out import held_out
from realm.model.device import choose_device
from realm.model.modes import evaluating
from realm.qa.question_files import Question, compiled
from realm.search.retriever import Retriever
from realm.store.knowledge_base import KnowledgeBase
from realm.systems.system import Best, Found, Ground, SystemModel, read_system, read_weights
from realm.tokens.tokenizer import Tokenizer
from realm.train.loop import TrainRun
from realm.train.run_config import RunConfig, generator

NAME = "t5"
IGNORED = -100
"""Target of padding, which has no loss."""
HEADS = 4
"""Attention heads of a network with random weights."""
INPUT_TOKENS = 64
"""Longest sentence or question in tokens; longer ones are cut."""
ANSWER_TOKENS = 16
"""Longest answer in tokens."""
SEARCHED = 20
"""Passages in which an answer that is a pattern looks for its text."""
PUBLISHED_SENTINEL, PUBLISHED_END = "<extra_id_0>", "</s>"
FILES = ("config.json", "model.safetensors", "tokenizer.json")


@dataclass(frozen=True)
class Config(RunConfig):
    """Settings of `realm baseline t5` (published: 11 billion weights, Adafactor; ours: AdamW)."""

    steps: int = 3000
    """Optimizer steps, those of salient spans first."""
    batch_size: int = 32
    """Sentences or questions per step (published: 128)."""
    learning_rate: float = 1e-3
    """Peak learning rate (published: 1e-3, constant)."""
    init: str | None = None
    """Published T5 checkpoint to start from, by hub name or folder, such as google/t5-small-ssm; it must have
    model.safetensors and tokenizer.json. None: random weights and the wordpieces of the knowledge base."""
    span_steps: int = 2000
    """Steps on masked salient spans of the text (published: 100,000 after 1,000,000 of random spans)."""
    layers: int = 4
    """Layers of the encoder, and of the decoder; unused with `init`."""
    width: int = 256
    """Width of the states; unused with `init`."""
    dev_every: int = 500
    """Steps between two evaluations on dev questions, after the first question; the best weights are kept."""
    dev_questions: int = 500
    """Dev questions in each evaluation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.span_steps < max(self.steps, 1):
            raise ValueError(
                f"span_steps is {self.span_steps}: it must be 0 or more, and fewer than the {self.steps} steps"
            )
        if self.width % HEADS:
            raise ValueError(f"width is {self.width}: it must be a multiple of {HEADS}, the attention heads")


# -- words ----------------------------------------------------------------------------------------------------------


class Words(Protocol):
    """Text to token ids and back."""

    pad_id: int
    end_id: int
    sentinel_id: int
    """Stands for the masked span."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def save(self, folder: Path) -> None: ...


class Wordpieces:
    """The wordpieces of the knowledge base: [MASK] is the sentinel, [SEP] the end."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self.pad_id, self.end_id, self.sentinel_id = tokenizer.pad_id, tokenizer.sep_id, tokenizer.mask_id
        self.size = tokenizer.vocab_size

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return self._tokenizer.encode(texts)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([one for one in ids if one not in (self.pad_id, self.end_id)])

    def save(self, folder: Path) -> None:
        self._tokenizer.save(folder)


class PublishedWords:
    """The tokens of a published T5 checkpoint."""

    def __init__(self, file: Path):
        from tokenizers import Tokenizer as FastTokenizer

        try:
            self._tokenizer = FastTokenizer.from_file(str(file))
        except Exception as error:  # the library raises Exception itself
            raise InputError(f"{file} is no tokenizer: {first_line(error)}") from None
        ids = {
            name: self._tokenizer.token_to_id(name) for name in ("<pad>", PUBLISHED_END, PUBLISHED_SENTINEL)
        }
        if None in ids.values():
            raise InputError(
                f"{file} is no tokenizer of T5: it lacks {' or '.join(k for k, v in ids.items() if v is None)}"
            )
        self.pad_id, self.end_id, self.sentinel_id = (one for one in ids.values() if one is not None)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [one.ids for one in self._tokenizer.encode_batch(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True)).strip()

    def save(self, folder: Path) -> None:
        self._tokenizer.save(str(folder / "tokenizer.json"))


# -- examples -------------------------------------------------------------------------------------------------------


class Example(NamedTuple):
    """Token ids of an input and its target, without the end."""

    input: list[int]
    target: list[int]


class Batch(NamedTuple):
    """Padded examples."""

    input_BT: Tensor
    mask_BT: Tensor
    target_BM: Tensor
    """`IGNORED` at padding."""

    def to(self, device: torch.device) -> "Batch":
        return Batch(*(part.to(device) for part in self))


def padded(examples: Sequence[Example], words: Words) -> Batch:
    """Examples as tensors; inputs and targets are cut, and end with the end token."""
    inputs = [[*one.input[: INPUT_TOKENS - 1], words.end_id] for one in examples]
    targets = [[*one.target[: ANSWER_TOKENS - 1], words.end_id] for one in examples]
    input_BT = torch.full((len(inputs), max(map(len, inputs))), words.pad_id)
    target_BM = torch.full((len(targets), max(map(len, targets))), IGNORED)
    for row, (ids, target) in enumerate(zip(inputs, targets, strict=True)):
        input_BT[row, : len(ids)] = torch.tensor(ids)
        target_BM[row, : len(target)] = torch.tensor(target)
    lengths = torch.tensor([len(ids) for ids in inputs])
    mask_BT = (torch.arange(input_BT.shape[1]) < lengths[:, None]).long()
    return Batch(input_BT, mask_BT, target_BM)


def span_examples(
    kb: KnowledgeBase, passages: np.ndarray, count: int, rng: np.random.Generator, words: Words
) -> list[Example]:
    """Masked sentences of random passages: one salient span, drawn from all spans of a passage, gives way to the sentinel."""
    parts: list[tuple[str, str, str]] = []
    while len(parts) < count:
        for passage in kb.passages(rng.choice(passages, count)):
            if passage.spans and len(parts) < count:
                span = passage.spans[int(rng.integers(len(passage.spans)))]
                start, end = next(
                    (a, b)
                    for a, b in [*passage.sentences, (0, len(passage.text))]
                    if a <= span.start and span.end <= b
                )
                text = passage.text
                parts.append((text[start : span.start], text[span.start : span.end], text[span.end : end]))
    before, hidden, after = (words.encode(texts) for texts in zip(*parts, strict=True))
    return [
        Example([*left, words.sentinel_id, *right], target)
        for left, target, right in zip(before, hidden, after, strict=True)
    ]


class QuestionExamples:
    """Questions with the texts of their answers; a pattern stands for the text that it matches in the best passages."""

    def __init__(self, kb: KnowledgeBase, questions: Sequence[Question], words: Words):
        answers = [question.answers for question in questions]
        patterns = [place for place, question in enumerate(questions) if question.regex]
        if patterns:
            asked = [questions[place] for place in patterns]
            for place, texts in zip(patterns, _matched(kb, asked), strict=True):
                answers[place] = texts
        kept = [(q.question, texts) for q, texts in zip(questions, answers, strict=True) if texts]
        if not kept:
            raise InputError(
                "no training question has an answer: patterns must match a passage of the knowledge base"
            )
        self._words = words
        self._questions = words.encode([question for question, _ in kept])
        self._answers = [words.encode(texts) for _, texts in kept]

    def __len__(self) -> int:
        return len(self._questions)

    def draw(self, count: int, rng: np.random.Generator) -> list[Example]:
        """Random questions, each with a random one of its answers."""
        return [
            Example(
                self._questions[place], self._answers[place][int(rng.integers(len(self._answers[place])))]
            )
            for place in rng.integers(len(self), size=count).tolist()
        ]


def _matched(kb: KnowledgeBase, questions: Sequence[Question]) -> Iterator[tuple[str, ...]]:
    """Per question the first text that one of its patterns matches in the best passages; empty without a match."""
    _, number_BK = Retriever(kb).search([one.question for one in questions], SEARCHED, "bm25", None)
    for question, numbers in zip(questions, number_BK, strict=True):
        matches: Iterator[re.Match[str] | None] = (
            compiled(pattern).search(passage.text)
            for passage in kb.passages(numbers[numbers >= 0])
            for pattern in question.answers
        )
        found = next((match for match in matches if match is not None and match.group().strip()), None)
        yield () if found is None else (found.group().strip(),)


# -- the network ----------------------------------------------------------------------------------------------------


def loss_of(network: Any, batch: Batch) -> Tensor:
    """Mean cross-entropy of the target tokens."""
    logits_BMV = network(
        input_ids=batch.input_BT, attention_mask=batch.mask_BT, labels=batch.target_BM
    ).logits
    return F.cross_entropy(logits_BMV.float().flatten(0, 1), batch.target_BM.flatten(), ignore_index=IGNORED)


def _start(ground: Ground, config: Config) -> tuple[SystemModel, Words]:
    """The network and its words before training."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(config.seed)
    if config.init is None:
        words = Wordpieces(ground.kb.tokenizer)
        sizes = T5Config(  # type: ignore[call-arg]
            vocab_size=words.size,
            d_model=config.width,
            d_kv=config.width // HEADS,
            d_ff=4 * config.width,
            num_layers=config.layers,
            num_decoder_layers=config.layers,
            num_heads=HEADS,
            pad_token_id=words.pad_id,
            eos_token_id=words.end_id,
            decoder_start_token_id=words.pad_id,
            tie_word_embeddings=True,
        )
        network = T5ForConditionalGeneration(sizes)
        return SystemModel(NAME, network, _sizes(network, published=False), words), words
    folder = Path(config.init if Path(config.init).is_dir() else from_hub(config.init, FILES))
    if missing := [name for name in FILES if not (folder / name).is_file()]:
        raise InputError(f"{config.init} has no {' and no '.join(missing)}: other formats are not read")
    try:
        network = T5ForConditionalGeneration.from_pretrained(
            folder, use_safetensors=True, local_files_only=True
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise InputError(f"{config.init} does not load as a T5: {first_line(error)}") from None
    published = PublishedWords(folder / "tokenizer.json")
    return SystemModel(NAME, network, _sizes(network, published=True), published), published


def _sizes(network: Any, published: bool) -> dict[str, Any]:
    return {"t5": network.config.to_dict(), "published": published}


def train(ground: Ground, out: Path, config: Config) -> Path:
    """Trains on masked spans of the corpus, then on questions -> `out`.

    Raises:
        InputError: no training question has an answer, no passage has a span, or `init` cannot be loaded.
    """
    model, words = _start(ground, config)
    network = model.network
    questions = QuestionExamples(ground.kb, ground.train, words)
    kb = ground.kb
    passages = np.flatnonzero(~held_out(kb.ids, kb.config.held_out))
    passages = passages[kb.tokens.span_starts.lengths[passages] > 0]
    if config.span_steps and not len(passages):
        raise InputError(
            f"{kb.folder} has no passage with a salient span: set span_steps=0, or use another tagger"
        )
    names = {"kb": kb.fingerprint, "questions": len(questions)}
    with TrainRun("t5", out, config, model, {network: config.learning_rate}, names) as run:
        best = Best(run, network, ground.dev[: config.dev_questions], ClosedBook(network, words))
        for step in run.steps():
            rng = generator(config.seed, step)
            if step < config.span_steps:
                examples = span_examples(kb, passages, config.batch_size, rng, words)
            else:
                examples = questions.draw(config.batch_size, rng)
            with run.autocast():
                loss = loss_of(network, padded(examples, words).to(run.device))
            run.update(loss, {})
            if run.step > config.span_steps and (
                run.step % config.dev_every == 0 or run.step == config.steps
            ):
                best.evaluate()
        best.restore()
        return run.finish()


# -- answering ------------------------------------------------------------------------------------------------------


class ClosedBook:
    """Answers by greedy decoding; the score is the mean log-probability of the answer's tokens. There is no evidence."""

    def __init__(self, network: Any, words: Words):
        self._network, self._words = network, words

    @torch.no_grad()
    def answer(self, questions: Sequence[str]) -> list[Found]:
        """The decoded answer to each question."""
        words, network = self._words, self._network
        examples = [Example(ids, []) for ids in words.encode(questions)]
        device = next(network.parameters()).device
        batch = padded(examples, words).to(device)
        with evaluating(network):
            made = network.generate(
                input_ids=batch.input_BT, attention_mask=batch.mask_BT, max_new_tokens=ANSWER_TOKENS,
                num_beams=1, do_sample=False, return_dict_in_generate=True, output_scores=True,
            )  # fmt: skip
            logp_BM = network.compute_transition_scores(made.sequences, made.scores, normalize_logits=True)
        found = []
        for ids, logp_M in zip(made.sequences[:, 1:].tolist(), logp_BM, strict=True):
            length = ids.index(words.end_id) + 1 if words.end_id in ids else len(ids)
            found.append(
                Found(
                    words.decode(ids[: length - 1] if words.end_id in ids else ids),
                    float(logp_M[:length].mean()),
                )
            )
        return found


def load(folder: Path, kb: KnowledgeBase) -> ClosedBook:
    """The trained system; it reads nothing from the knowledge base."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = read_system(folder)["sizes"]
    network: Any = T5ForConditionalGeneration(T5Config(**sizes["t5"]))
    network.load_state_dict(read_weights(folder), strict=False)
    network.tie_weights()
    network.to(choose_device("auto")).eval()
    words: Words = (
        PublishedWords(folder / "tokenizer.json")
        if sizes["published"]
        else Wordpieces(Tokenizer.load(folder))
    )
    return ClosedBook(network, words)
