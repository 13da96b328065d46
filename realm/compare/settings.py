"""Settings of `realm compare` and `realm ablate`: the documents, questions, rows and seeds of a table."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class PublishedConfig:
    """The checkpoints of the row `published`.

    A checkpoint is a folder, a hub name, or the prefix of TensorFlow files, as in `realm convert`.
    """

    checkpoint: str = ""
    """An open-QA checkpoint, which answers without further training, or a pre-trained embedder, which is first trained on the
    questions. Empty: the row is left out."""
    embedder: str = ""
    """Embedder of passages. An open-QA checkpoint needs this setting, because its own embedder was fine-tuned for questions."""
    encoder: str = ""
    """Masked-LM reader from which fine-tuning starts, if `checkpoint` is an embedder."""
    tokenizer: str = ""
    """Tokenizer to use if the checkpoint has no tokenizer."""


@dataclass(frozen=True)
class ReadingConfig:
    """Questions with passages, on which the readers of the rows are trained before the questions of the table."""

    corpus: tuple[str, ...] = ()
    """Documents that answer the questions; empty: the readers are not trained on such questions."""
    questions: tuple[str, ...] = ()
    """Question files. Each question names a document that contains an answer (`document_id` or `passage_id`)."""
    settings: tuple[str, ...] = ()
    """Settings of this training, as NAME=VALUE, that differ from `[finetune]`."""

    def __post_init__(self) -> None:
        if not bool(self.corpus) == bool(self.questions) >= bool(self.settings):
            raise ValueError("reading needs both corpus and questions")


@dataclass(frozen=True)
class DataConfig:
    """The documents and questions for Table 1 and Table 2 of the paper. A preset has these settings in its section `[data]`."""

    corpus: tuple[str, ...] = ("package:vital-articles",)
    """Documents of the knowledge base (Z)."""
    text: tuple[str, ...] = ()
    """Documents of the corpus of masked sentences (X) of the row realm-x; empty: the row is left out."""
    documents: int = 0
    """Number of documents that are used from `corpus` and from `text`, for example to try a preset. The first documents are
    used. 0: all documents."""
    encoder: str = "package:realm-mini"
    """Encoder or model from which `realm mlm` starts. The tokenizer of this encoder is used for the text."""
    warm_start: bool = True
    """Whether the inverse cloze task trains the retriever before REALM does (paper: yes). False: REALM starts from the embedder
    of `encoder`, which must be able to retrieve. The row `given`, which keeps this embedder, then replaces the row `orqa`."""
    train: tuple[str, ...] = ()
    """Question files for training, which need test files too; empty: questions made from the corpus."""
    dev: tuple[str, ...] = ()
    """Question files by which the best weights are chosen; empty: a tenth of the training questions, by the rule of ORQA."""
    tests: Mapping[str, str] = field(default_factory=dict)
    """Name of a test -> question file of the test; without tests, questions made from documents that have no training
    questions."""
    held_out: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Name of a test -> files of `train`. The questions of these files that the rule of ORQA makes dev questions become a test:
    no row is trained on them, and no weights are chosen by them."""
    reading: ReadingConfig = field(default_factory=ReadingConfig)
    """Questions with passages, from which readers learn to read."""
    published: PublishedConfig = field(default_factory=PublishedConfig)
    """Published REALM model to compare with."""

    def __post_init__(self) -> None:
        if not self.corpus:
            raise ValueError("corpus is empty: give at least one source of documents")
        if self.documents < 0:
            raise ValueError(f"documents is {self.documents}: it must be 0 or more")
        if self.train and not self.has_tests:
            raise ValueError("train needs tests: give test files, or leave train empty")
        for name in (*self.tests, *self.held_out):
            if name in ("train", "dev", "reading"):
                raise ValueError(f"tests: {name!r} is the name of other questions: use another name")
            if not re.fullmatch(r"[A-Za-z0-9-]+", name):
                raise ValueError(
                    f"tests: {name!r} is not a valid name of a test: use only letters, digits and hyphens"
                )
        for name, files in self.held_out.items():
            if name in self.tests:
                raise ValueError(f"held_out: {name!r} is also in tests: use another name")
            if not files or not set(files) <= set(self.train):
                raise ValueError(f"held_out: {name!r} needs files that are also in train")

    @property
    def has_tests(self) -> bool:
        """Whether the tests have questions of the user. If not, questions are made from the corpus."""
        return bool(self.tests or self.held_out)


@dataclass(frozen=True)
class TableConfig:
    """Settings of `realm compare` and `realm ablate`."""

    rows: tuple[str, ...] = ()
    """Rows to make; empty: all rows."""
    seeds: tuple[int, ...] = (0,)
    """Seeds of ICT, pre-training and fine-tuning."""
    answer_seeds: int = 1
    """Number of seeds, from the first on, with which systems are trained on questions and tested. 0: only the retrieval of the
    starts is measured."""

    def __post_init__(self) -> None:
        if not self.seeds:
            raise ValueError("seeds is empty: give at least one seed")
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds is {list(self.seeds)}: each seed must be there only once")
        if not 0 <= self.answer_seeds <= len(self.seeds):
            raise ValueError(
                f"answer_seeds is {self.answer_seeds}: it must be 0 to {len(self.seeds)}, the number of seeds"
            )
