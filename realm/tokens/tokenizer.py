"""The tokenizer. Passages are tokenized once, when they are added to the knowledge base; training and search use the ids."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from realm.errors import DamagedError, InputError, RealmError, check_encodable, first_line, out_of_memory
from realm.files import read_json
from realm.hub import encoder_folder

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""BERT's special wordpieces; a vocabulary from `Tokenizer.train` begins with these wordpieces."""
_PROBE = "A known word, and one of no language: \u2603x\u2603."


class Encoding(NamedTuple):
    """Wordpieces of one text: ids, and the characters [start, end) of each wordpiece."""

    ids: list[int]
    starts: list[int]
    ends: list[int]


class Tokenizer:
    """A wordpiece tokenizer, stored as `tokenizer.json`. Model and knowledge base must have equal tokenizer fingerprints."""

    fingerprint: str
    """Digest of everything that determines the wordpieces of a text. Files with different formatting can have the same
    digest."""
    name: str
    """The folder or name that the tokenizer was loaded from; "" for a tokenizer from `train`."""

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
        highest = max(vocabulary.values())
        if highest > 10 * len(vocabulary) + 1000:  # the library would make a word for each unused number
            raise InputError(
                f"the tokenizer has {len(vocabulary):,} wordpieces, one of which has the number {highest:,}"
            )
        self._tokenizer = tokenizer
        self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = (
            vocabulary[name] for name in SPECIAL
        )
        tokenizer.encode_special_tokens = True  # "[SEP]" in a document is plain text
        self.vocab_size = tokenizer.get_vocab_size()
        self._json = tokenizer.to_str()
        self.fingerprint = _fingerprint(tokenizer, vocabulary)

    def __reduce__(self) -> tuple[Any, ...]:
        """For processes of a cluster. The library's own pickle loses `encode_special_tokens`."""
        return _read, (self._json, self.name)

    @cached_property
    def separates_at_spaces(self) -> bool:
        """Whether the wordpieces of a text are those of its parts between white space, as with every tokenizer of BERT."""
        normalizer, words = self._tokenizer.normalizer, self._tokenizer.pre_tokenizer
        added = self._tokenizer.get_added_tokens_decoder().values()
        return (
            isinstance(normalizer, normalizers.BertNormalizer)
            and normalizer.clean_text  # else control characters between two sentences are wordpieces
            and isinstance(words, pre_tokenizers.BertPreTokenizer)
            and all(token.special for token in added)
        )

    def vocabulary(self) -> list[str]:
        """The wordpieces by id."""
        number_of = self._tokenizer.get_vocab()
        return sorted(number_of, key=number_of.__getitem__)

    @cached_property
    def continuing_ids(self) -> frozenset[int]:
        """Ids of the wordpieces that continue a word."""
        return frozenset(i for piece, i in self._tokenizer.get_vocab().items() if piece.startswith("##"))

    @classmethod
    def load(cls, name: str | Path) -> "Tokenizer":
        """Loads a tokenizer from a model folder, a tokenizer folder, a packaged encoder's name or a hub name.

        Raises:
            InputError: there is no such folder or name, or the folder contains no fast tokenizer.
        """
        folder = Path(encoder_folder(str(name)))
        file = folder / "tokenizer.json"
        if not file.exists() and (folder / "vocab.txt").exists():
            return cls.from_vocabulary(folder, str(name))
        if not file.exists():
            raise InputError(f"{name} has no tokenizer.json: use a folder that contains a fast tokenizer")
        try:
            found = cls(FastTokenizer.from_file(str(file)), str(name))
            found.encode([_PROBE])  # some files can only be loaded
            return found
        except (RealmError, KeyboardInterrupt, SystemExit):
            raise
        # The Rust library raises bare Exception for any unreadable file, or panics, which is no Exception.
        except BaseException as error:
            if out_of_memory(error):
                raise
            raise InputError(f"{file} is not a tokenizer: {first_line(error)}") from error

    @classmethod
    def from_vocabulary(cls, folder: Path, name: str = "") -> "Tokenizer":
        """BERT's tokenizer from vocab.txt and, if present, tokenizer_config.json in a folder.

        Raises:
            InputError: vocab.txt cannot be read, or lacks BERT's special tokens.
            DamagedError: tokenizer_config.json is damaged.
        """
        try:
            pieces = (folder / "vocab.txt").read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise InputError(f"{folder}: the tokenizer cannot be read: {error}") from error
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
            raise DamagedError(f"{config} is damaged: {error}") from error
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
        tokenizer.add_special_tokens([special for special in SPECIAL if special in pieces])
        return cls(tokenizer, name)

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "Tokenizer":
        """Trains a lower-casing wordpiece vocabulary; equal texts give equal vocabularies.

        The library's wordpiece trainer breaks ties at random; the byte-pair trainer does not. Therefore the byte-pair trainer
        learns the pieces, from words that begin with a mark: a piece with the mark begins a word."""
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
        """Wordpiece ids of each text, without special tokens.

        Raises:
            InputError: a text has one half of a surrogate pair.
        """
        try:
            return [e.ids for e in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]
        except TypeError:
            for text in texts:
                if isinstance(text, str):
                    check_encodable(text)
            raise

    def encode_with_offsets(self, texts: Sequence[str]) -> list[Encoding]:
        """Wordpiece ids of each text with their character offsets."""
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [Encoding(e.ids, [s for s, _ in e.offsets], [t for _, t in e.offsets]) for e in encodings]

    def as_huggingface(self) -> FastTokenizer:
        """The tokenizer of transformers: inputs are [CLS] a [SEP] b [SEP], and "[SEP]" in a text is the special token.

        Only to write files for transformers, and to read questions as transformers does (`realm.interop`, `realm.qa.reading`).
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
        """Ids of a sentence in which the user wrote [MASK]; each [MASK] is one id."""
        parts = self.encode(text.split("[MASK]"))
        ids = list(parts[0])
        for part in parts[1:]:
            ids += [self.mask_id, *part]
        return ids

    def tokens(self, ids: Sequence[int]) -> list[str]:
        return [self._tokenizer.id_to_token(int(i)) or SPECIAL[1] for i in ids]

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([int(i) for i in ids])


def _read(json: str, name: str) -> Tokenizer:
    return Tokenizer(FastTokenizer.from_str(json), name)


def _fingerprint(tokenizer: FastTokenizer, vocabulary: dict[str, int]) -> str:
    """Digest of everything that determines the wordpieces of a text, without formatting and without the post-processor."""
    # The library pickles each part as JSON, with the vocabulary in the order of ids. This is much faster
    # than parsing the whole file and writing the relevant half.
    model, normalizer, words = tokenizer.model.__getstate__(), tokenizer.normalizer, tokenizer.pre_tokenizer
    settings = json.loads(normalizer.__getstate__()) if normalizer else {}
    if settings.get("type") == "BertNormalizer" and settings["strip_accents"] is None:
        settings["strip_accents"] = settings["lowercase"]
    # Only the ids of special tokens matter, because "[SEP]" in a text is plain text.
    whole = [
        (i, word.content, word.single_word, word.lstrip, word.rstrip, word.normalized)
        for i, word in tokenizer.get_added_tokens_decoder().items()
        if not word.special
    ]
    cutting = json.loads(words.__getstate__()) if words else {}
    special = [vocabulary[name] for name in SPECIAL]
    rest = json.dumps([settings, cutting, sorted(whole), special], sort_keys=True)
    return hashlib.sha256(model + rest.encode()).hexdigest()[:16]
