"""T5 closed-book (Roberts et al. 2020): an encoder-decoder answers from its weights alone, without retrieval.

Training has two parts. First, the network is trained on the text of the knowledge base: a salient span of a sentence is
replaced by a sentinel, and the decoder predicts the span. Then the network is trained on questions and answers. Training can
start from a published checkpoint, which was trained on more text.

    input   a sentence with [MASK] instead of a name or date, or a question     target   the span, or an answer

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
from torch import Tensor, nn

from realm.errors import InputError, first_line
from realm.hub import from_hub
from realm.masking.held_out import held_out
from realm.model.device import DeviceConfig, Precision, autocast, choose_device
from realm.model.modes import evaluating
from realm.qa.question_files import Question, compiled
from realm.search.retriever import Retriever
from realm.store.knowledge_base import KnowledgeBase
from realm.systems.system import Best, Found, Ground, SystemModel, load_weights, read_system
from realm.tokens.tokenizer import Tokenizer
from realm.train.loop import TrainRun
from realm.train.run_config import QuestionsRunConfig, generator

NAME = "t5"
IGNORED = -100
"""Target of padding, which has no loss."""
HEADS = 4
"""Attention heads of a network with random weights."""
INPUT_TOKENS = 64
"""Largest number of tokens of a sentence or question; longer texts are cut."""
ANSWER_TOKENS = 16
"""Largest number of tokens of an answer."""
SEARCHED = 20
"""Number of passages that are searched for a text which matches an answer, if the answer is a regular expression."""
PUBLISHED_SENTINEL, PUBLISHED_END = "<extra_id_0>", "</s>"
SAFE_WEIGHTS, OLD_WEIGHTS = "model.safetensors", "pytorch_model.bin"
TOKENIZER, OLD_TOKENIZER = "tokenizer.json", "spiece.model"
FILES = ("config.json", SAFE_WEIGHTS, TOKENIZER, OLD_TOKENIZER)
"""What is downloaded of a published checkpoint. Older checkpoints, such as Google's, may have only `OLD_WEIGHTS` and
`OLD_TOKENIZER`."""


@dataclass(frozen=True)
class Config(QuestionsRunConfig):
    """Settings of `realm baseline t5` (published: 11 billion weights and Adafactor; here: AdamW)."""

    steps: int = 3000
    """Optimizer steps on spans and on questions together; the steps on spans come first."""
    batch_size: int = 32
    """Sentences or questions per step (published: 128)."""
    learning_rate: float = 1e-3
    """Peak learning rate (published: 1e-3, constant)."""
    init: str | None = None
    """Published T5 checkpoint to start from: a hub name, such as google/t5-small-ssm, or a folder with config.json,
    model.safetensors or pytorch_model.bin, and tokenizer.json or spiece.model. None: random weights, and the wordpieces of the
    knowledge base."""
    span_steps: int = 2000
    """Steps on masked salient spans of the text (published: 100,000, after 1,000,000 steps on random spans). Dev questions are
    evaluated only after these steps."""
    layers: int = 4
    """Number of layers of the encoder and of the decoder; not used with `init`."""
    width: int = 256
    """Width of the states; not used with `init`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.span_steps < max(self.steps, 1):
            raise ValueError(
                f"span_steps is {self.span_steps}: it must be 0 or more, and less than steps, which is {self.steps}"
            )
        if self.width % HEADS:
            raise ValueError(
                f"width is {self.width}: it must be a multiple of {HEADS}, the number of attention heads"
            )


class Words(Protocol):
    """Converts texts to token ids, and token ids to texts."""

    pad_id: int
    end_id: int
    sentinel_id: int
    """Token that stands in the input where the masked span was."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def save(self, folder: Path) -> None: ...


_WRITTEN = tuple(
    (re.compile(pattern), written)
    for pattern, written in (
        (r"(?<=\w) ' (?=(s|t|re|ve|ll|d|m)\b)", "'"),  # queen ' s
        (r"\b([odl]) ' (?=\w)", r"\1'"),  # o ' brien
        (r"(?<=\w) ([-–/]) (?=\w)", r"\1"),  # twenty - one
        (r"(?<=\d)\. (?=\d)", "."),  # 3. 5
        (r"(?<=\d), (?=\d{3}(?!\d))", ","),  # 1, 000
        (r"(?<=\d) : (?=\d)", ":"),  # 20 : 7
        (r"\b(\w)\. (?=\w\.)", r"\1."),  # u. s.
    )
)


def as_written(text: str) -> str:
    """Text of decoded wordpieces without the spaces around punctuation marks that belong to a word or a number.

    With these spaces, "u. s." would not match "U.S.", because exact match removes punctuation marks but not spaces.

    >>> as_written("the queen ' s u. s. visit, july 4, 1976, cost 1, 000 - 2, 000 pounds")
    "the queen's u.s. visit, july 4, 1976, cost 1,000-2,000 pounds"
    """
    for pattern, written in _WRITTEN:
        text = pattern.sub(written, text)
    return text


class Wordpieces:
    """The wordpieces of the knowledge base. [MASK] is the sentinel, and [SEP] is the end token."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self.pad_id, self.end_id, self.sentinel_id = tokenizer.pad_id, tokenizer.sep_id, tokenizer.mask_id
        self.size = tokenizer.vocab_size

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return self._tokenizer.encode(texts)

    def decode(self, ids: Sequence[int]) -> str:
        return as_written(
            self._tokenizer.decode([one for one in ids if one not in (self.pad_id, self.end_id)])
        )

    def save(self, folder: Path) -> None:
        self._tokenizer.save(folder)


class PublishedWords:
    """The tokens of a published T5 checkpoint."""

    def __init__(self, folder: Path):
        """Loads the tokens from a file in the folder of the checkpoint.

        Raises:
            InputError: the file is missing, or is not a tokenizer of T5.
        """
        from tokenizers import Tokenizer as FastTokenizer
        from transformers import T5Tokenizer

        file = folder / TOKENIZER
        if not file.is_file():
            file = folder / OLD_TOKENIZER
        try:
            if file.name == TOKENIZER:
                self._tokenizer = FastTokenizer.from_file(str(file))
            else:
                self._tokenizer = T5Tokenizer.from_pretrained(folder, local_files_only=True).backend_tokenizer
        except Exception as error:  # the libraries raise errors of many classes
            raise InputError(f"{file} is not a tokenizer: {first_line(error)}") from None
        ids = {
            name: self._tokenizer.token_to_id(name) for name in ("<pad>", PUBLISHED_END, PUBLISHED_SENTINEL)
        }
        if None in ids.values():
            raise InputError(
                f"{file} is not a tokenizer of T5: it has no token {' or '.join(k for k, v in ids.items() if v is None)}"
            )
        self.pad_id, self.end_id, self.sentinel_id = (one for one in ids.values() if one is not None)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [one.ids for one in self._tokenizer.encode_batch(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True)).strip()

    def save(self, folder: Path) -> None:
        self._tokenizer.save(str(folder / TOKENIZER))


class Example(NamedTuple):
    """Token ids of an input and of its target, without the end tokens."""

    input: list[int]
    target: list[int]


class Batch(NamedTuple):
    """Tensors of padded examples."""

    input_BT: Tensor
    mask_BT: Tensor
    target_BM: Tensor
    """`IGNORED` at padding."""

    def to(self, device: torch.device) -> "Batch":
        return Batch(*(part.to(device) for part in self))


def padded(examples: Sequence[Example], words: Words) -> Batch:
    """Tensors of examples. Inputs and targets that are too long are cut; all inputs and targets end with the end token."""
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
    """Masked sentences of random passages. A random salient span of each passage is replaced by the sentinel.

    Of a sentence that is too long, the part around the span is kept.
    """
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
    examples = []
    for left, target, right in zip(before, hidden, after, strict=True):
        room = INPUT_TOKENS - 2  # without the sentinel and the end token
        kept = left[max(0, len(left) - max(room // 2, room - len(right))) :]
        examples.append(Example([*kept, words.sentinel_id, *right], target))
    return examples


class QuestionExamples:
    """Questions with the texts of their answers.

    If the answers are regular expressions, the text is what one of these expressions matches in the best passages.
    """

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
                "no training question has an answer: answers that are regular expressions must match in a retrieved passage"
            )
        self._words = words
        self._questions = words.encode([question for question, _ in kept])
        self._answers = [words.encode(texts) for _, texts in kept]

    def __len__(self) -> int:
        return len(self._questions)

    def draw(self, count: int, rng: np.random.Generator) -> list[Example]:
        """Random questions, and for each of these questions a random answer."""
        return [
            Example(
                self._questions[place], self._answers[place][int(rng.integers(len(self._answers[place])))]
            )
            for place in rng.integers(len(self), size=count).tolist()
        ]


def _matched(kb: KnowledgeBase, questions: Sequence[Question]) -> Iterator[tuple[str, ...]]:
    """For each question, the first text in the best passages that matches an answer; an empty tuple if nothing matches."""
    _, number_BK = Retriever(kb).search([one.question for one in questions], SEARCHED, "bm25", None)
    for question, numbers in zip(questions, number_BK, strict=True):
        matches: Iterator[re.Match[str] | None] = (
            compiled(pattern).search(passage.text)
            for passage in kb.passages(numbers[numbers >= 0])
            for pattern in question.answers
        )
        found = next((match for match in matches if match is not None and match.group().strip()), None)
        yield () if found is None else (found.group().strip(),)


def loss_of(network: Any, batch: Batch) -> Tensor:
    """Mean cross-entropy of the target tokens."""
    logits_BMV = network(
        input_ids=batch.input_BT, attention_mask=batch.mask_BT, labels=batch.target_BM
    ).logits
    return F.cross_entropy(logits_BMV.float().flatten(0, 1), batch.target_BM.flatten(), ignore_index=IGNORED)


def _start(ground: Ground, config: Config) -> tuple[SystemModel, Words]:
    """The network and its tokens before training."""
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
    folder = _published(config.init)
    try:
        # With `weights_only`, pytorch_model.bin can contain only tensors; anything else is refused.
        network = T5ForConditionalGeneration.from_pretrained(folder, local_files_only=True, weights_only=True)
    except Exception as error:  # the libraries raise errors of many classes
        raise InputError(f"{config.init} cannot be loaded as a T5 model: {first_line(error)}") from None
    published = PublishedWords(folder)
    return SystemModel(NAME, network, _sizes(network, published=True), published), published


def _published(name: str) -> Path:
    """The folder of a published checkpoint.

    Raises:
        InputError: the checkpoint is neither a folder nor on the hub, or lacks a file.
    """
    folder = Path(name)
    if not folder.is_dir():
        folder = Path(from_hub(name, FILES))
        if not (folder / SAFE_WEIGHTS).is_file():
            folder = Path(from_hub(name, (*FILES, OLD_WEIGHTS)))
    for names in (("config.json",), (SAFE_WEIGHTS, OLD_WEIGHTS), (TOKENIZER, OLD_TOKENIZER)):
        if not any((folder / one).is_file() for one in names):
            raise InputError(f"{name} has no {' or '.join(names)}: realm reads no other formats")
    return folder


def _sizes(network: Any, published: bool) -> dict[str, Any]:
    # T5 1.1 (such as t5-*-ssm-nq) has output weights of its own, and does not scale the last states.
    # transformers shows neither in its configuration: `T5Config` ties the weights, and reads the scale from this key.
    settings = network.config.to_dict() | {"tie_word_embeddings": network.config.scale_decoder_outputs}
    return {
        "t5": settings,
        "tied": network.lm_head.weight is network.shared.weight,
        "published": published,
    }


def train(ground: Ground, out: Path, config: Config) -> Path:
    """Trains a network on masked spans of the corpus, and then on questions -> `out`.

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
    with TrainRun("t5", out, config, model, {network: config.learning_rate}, ground.given()) as run:
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


class ClosedBook:
    """Answers by greedy decoding, without a passage. The score is the mean log-probability of the tokens of the answer."""

    def __init__(self, network: Any, words: Words, precision: Precision = "fp32"):
        self._network, self._words, self._precision = network, words, precision

    @torch.no_grad()
    def answer(self, questions: Sequence[str]) -> list[Found]:
        """The decoded answer to each question."""
        words, network = self._words, self._network
        examples = [Example(ids, []) for ids in words.encode(questions)]
        device = next(network.parameters()).device
        batch = padded(examples, words).to(device)
        with evaluating(network), autocast(device, self._precision):
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


def load(folder: Path, kb: KnowledgeBase, config: DeviceConfig) -> ClosedBook:
    """The trained system. `kb` is not used."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = read_system(folder)["sizes"]
    network: Any = T5ForConditionalGeneration(T5Config(**sizes["t5"]))
    if not sizes["tied"]:
        network.lm_head.weight = nn.Parameter(network.lm_head.weight.detach().clone())
    load_weights(network, folder)
    network.to(choose_device(config.device)).eval()
    words: Words = PublishedWords(folder) if sizes["published"] else Wordpieces(Tokenizer.load(folder))
    return ClosedBook(network, words, config.precision)
