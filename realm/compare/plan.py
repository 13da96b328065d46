"""What a table has: its rows, models, questions and tests, and the paths of their files. `commands` has the stages.

DIR/data.json                         the data that the folder was made with
DIR/kb, DIR/text-kb                   the corpora Z and X
DIR/documents/{kb,text-kb}.jsonl      the first documents of each corpus, if only these are used
DIR/published-kb                      Z in the wordpieces of a published model
DIR/questions/{train,dev}.jsonl       questions for training and for choosing the best weights
DIR/questions/TEST.jsonl              the questions of a test of `data.held_out`, or made questions (TEST is then `test`)
DIR/models/START[-SEED]               the starts, which are not trained on questions
DIR/reading-kb                        documents that answer the questions of `data.reading`
DIR/questions/reading-{train,dev}.jsonl  the questions of `data.reading`
DIR/readers/START[-SEED]              the starts, trained on the questions of `data.reading`
DIR/rows/ROW[-SEED]                   the systems trained on questions
DIR/predictions/ROW[-SEED].TEST.jsonl answers with evidence
DIR/reports/ROW[-SEED].TEST.json      scores, and the outcome of each question
DIR/reports/retrieval-START[-SEED].TEST.json  retrieval of a start or of BM25, and the rank of each question
DIR/reports/probe-START[-SEED].json   retrieval and reading of masked facts, of a start or of BM25
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from realm.compare.rows import (
    BM25,
    GIVEN,
    OWN_NETWORK,
    PUBLISHED,
    READING_SETTINGS,
    STARTS,
    WITHOUT_ICT,
    Row,
    Start,
    beside,
    encoder_of,
    row_settings,
)
from realm.compare.settings import DataConfig, TableConfig
from realm.documents.sources import files_of
from realm.errors import InputError
from realm.model.manifest import read_manifest
from realm.qa.probe import ProbeConfig
from realm.qa.question_files import read_questions
from realm.questions import QuestionsConfig
from realm.settings import read_config
from realm.store.settings import KnowledgeBaseConfig
from realm.systems.knn_lm import KnnConfig
from realm.systems.system import SYSTEMS, module_of
from realm.text.fields import FieldNames
from realm.train.finetune import FinetuneConfig
from realm.train.ict import IctConfig
from realm.train.mlm import MlmConfig
from realm.train.pretrain import PretrainConfig

T = TypeVar("T")

MADE = "made"
"""Name of the test whose questions are made from the corpus."""
READING = "reading"
"""Name of the questions of `data.reading` in reports, and the beginning of the names of their files."""

STAGES = {
    "kb": KnowledgeBaseConfig,
    "mlm": MlmConfig,
    "ict": IctConfig,
    "pretrain": PretrainConfig,
    "finetune": FinetuneConfig,
    "probe": ProbeConfig,
    "questions": QuestionsConfig,
    "knn": KnnConfig,
}
"""Tables of the preset that configure the stages -> their settings. The tables in `BASELINES` come in addition."""
BASELINES = tuple(f"baseline.{system}" for system in SYSTEMS)


@dataclass(frozen=True)
class TablePlan:
    """The rows and files of a table in a folder."""

    config: TableConfig
    data: DataConfig
    preset: str | None
    """Configuration file or preset of every stage; None: default settings."""
    folder: Path
    table: Mapping[str, Row]
    changed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """A name in `STAGES` or `BASELINES` -> settings, as NAME=VALUE, that differ from the preset."""

    # -- what is measured -----------------------------------------------------------------------------------------

    def rows(self) -> dict[str, Row]:
        """The rows to make, in the order of the table.

        Raises:
            InputError: a row in `config.rows` does not exist, or needs data or a setting that are not given.
        """
        left_out = self.left_out()
        wanted = self.config.rows or tuple(name for name in self.table if name not in left_out)
        for name in wanted:
            if name not in self.table:
                raise InputError(f"there is no row {name!r}: rows are {', '.join(self.table)}")
            if name in left_out:
                raise InputError(f"the row {name} needs {left_out[name]}")
        others = {beside(self.table[name].start) for name in wanted} - {"realm"}
        with_models = {*wanted, *(self.table[name].of for name in wanted), *others}
        return {name: row for name, row in self.table.items() if name in with_models}

    def left_out(self) -> dict[str, str]:
        """Name of a row that cannot be made, or that measures nothing -> what the row needs."""
        lacking = {}
        for name, row in self.table.items():
            if STARTS[row.start].other_text and not self.data.text:
                lacking[name] = "another corpus: give the documents of this corpus in data.text"
            if row.start == PUBLISHED and not self.data.published.checkpoint:
                lacking[name] = "published weights: give a checkpoint in data.published.checkpoint"
            if row.start in ("ict", "no-ict") and not self.data.warm_start:
                lacking[name] = "the inverse cloze task: set data.warm_start to true"
            if name == GIVEN and self.data.warm_start:
                lacking[name] = "an encoder that can already retrieve: set data.warm_start to false"
            if row.start == "no-guard" and self.pretrain.health.margin < 0:  # REALM refuses no index either
                lacking[name] = "health checks that can refuse an index: set pretrain.health.margin to 2"
        return lacking

    def starts(self) -> list[str]:
        """The starts that the rows need. A start comes after the starts from which it is made."""
        needed: list[str] = []

        def need(name: str) -> None:
            start = self.start(name)
            for before in (start.init, start.encoder_of):
                if before:
                    need(before)
            if name not in needed:
                needed.append(name)

        for row in self.rows().values():
            need(row.start)
        return needed

    def start(self, name: str) -> Start:
        """How a start is made with these data."""
        start = STARTS[name]
        if self.data.warm_start:
            return start
        init, encoder = (WITHOUT_ICT.get(one, one) for one in (start.init, start.encoder_of))
        return start._replace(init=init, encoder_of=encoder)

    def before_questions(self) -> list[str]:
        """The starts, without a published model that was trained on questions. A published model must already be converted."""
        return [name for name in self.starts() if not self.is_published_reader(name)]

    def is_published_reader(self, start: str) -> bool:
        """Whether the start is a published model that answers questions without further training."""
        if start != PUBLISHED:
            return False
        return read_manifest(self.start_model(start, self.config.seeds[0]))["span_reader"]

    def tests(self) -> dict[str, Path]:
        """Name of a test -> question file."""
        if not self.data.has_tests:
            return {MADE: self.questions("test")}
        given = {name: Path(file) for name, file in self.data.tests.items()}
        return given | {name: self.questions(name) for name in self.data.held_out}

    def check(self) -> None:
        """Checks rows, corpora and question files before the first stage, because a later stage would fail only after hours.

        Raises:
            InputError: a row, a corpus, a question file or a setting of a stage cannot be used; `data.warm_start` is
                false, but `mlm` does not keep the embedder of `data.encoder`; or the index of the row `stale` would never be
                rebuilt, because `pretrain.refresh.every` is 0 or `pretrain.steps` is too small.
        """
        self.rows()
        self.stages()
        if self.probed() and not self._stage(KnowledgeBaseConfig, "kb").held_out:
            raise InputError(
                "kb.held_out is 0, but the tables measure models on masked facts in held-out passages: set it, as "
                "in the preset tables"
            )
        if not self.data.warm_start and self._stage(MlmConfig, "mlm").embedder_start != "given":
            raise InputError(
                "data.warm_start is false, but mlm.embedder_start is not given, so the embedder of data.encoder would be "
                'replaced: set mlm.embedder_start to "given", as in the preset wikipedia-minilm'
            )
        text = self.data.text if self.uses_text else ()
        reading = self.data.reading.corpus if self.reads_first else ()
        for source in (*self.data.corpus, *text, *reading):
            files_of(source)
        for file in (*self.data.train, *self.data.dev, *self.data.tests.values()):
            read_questions(file)
        self._check_trained()
        every, steps = self.pretrain.refresh.every, self.pretrain.steps
        stale = [STARTS[name].stale for name in self.starts() if STARTS[name].stale > 1]
        if any(not every or factor * every >= steps for factor in stale):
            raise InputError(
                f"the row stale rebuilds the index every {max(stale)} * pretrain.refresh.every steps; pretrain.refresh.every "
                f"is {every} and pretrain.steps is {steps}, so the index would never be rebuilt: raise pretrain.steps, lower "
                "pretrain.refresh.every (0 means never), or leave out the row stale"
            )

    def _check_trained(self) -> None:
        """Checks the settings of each training, because a row and the preset can contradict each other.

        Raises:
            InputError: a start, a reader or a row cannot be trained with its settings.
        """
        trained: list[tuple[str, str, tuple[str, ...]]] = [
            (f"the model {start}", STARTS[start].made_by, self.start_settings(start, seed))
            for start in self.starts()
            for seed in self.seeds_of(start)
        ]
        for seed in self.config.seeds[: self.config.answer_seeds]:
            if self.reads_first:
                trained.append(("data.reading", "finetune", self.reading_settings(seed)))
            trained += [
                (
                    f"the row {name}",
                    f"baseline.{row.system}" if row.system else "finetune",
                    row_settings(row, seed),
                )
                for name, row in self.rows().items()
                if not row.of
            ]
        configs = self._configs()
        for what, stage, settings in trained:
            if stage in configs:  # nothing is trained for a published model or for the command `convert`
                try:
                    self._stage(configs[stage], stage, settings)
                except InputError as error:
                    raise InputError(f"{what}: {error}") from None

    def stages(self) -> dict[str, Any]:
        """A name in `STAGES`, or in `BASELINES` if a row needs it or a setting was changed -> all settings of this table.

        Raises:
            InputError: a setting cannot be used.
        """
        return {name: self._stage(config, name) for name, config in self._configs().items()}

    def _configs(self) -> dict[str, type[Any]]:
        """A name in `STAGES`, or in `BASELINES` if a row needs it or a setting was changed -> class of its settings."""
        systems = {f"baseline.{row.system}" for row in self.rows().values() if row.system}
        configs = {
            name: module_of(name.partition(".")[2]).Config
            for name in BASELINES
            if name in {*systems, *self.changed}
        }
        return STAGES | configs

    @property
    def names(self) -> FieldNames:
        """The keys and columns that have the parts of the documents of the corpora."""
        return self._stage(KnowledgeBaseConfig, "kb").names

    @property
    def pretrain(self) -> PretrainConfig:
        return self._stage(PretrainConfig, "pretrain")

    def _stage(self, config: type[T], name: str, further: tuple[str, ...] = ()) -> T:
        return read_config(config, self.preset, name, (*self.changed.get(name, ()), *further))

    @property
    def reads_first(self) -> bool:
        """Whether a row is trained on the questions of `data.reading`."""
        return bool(self.data.reading.questions) and self.trains_readers

    @property
    def trains_readers(self) -> bool:
        """Whether a row is trained on questions from a start whose reader can learn to read first."""
        trained = [row for row in self.rows().values() if row.system != "t5" and row.start != PUBLISHED]
        return bool(self.config.answer_seeds and trained)

    @property
    def uses_text(self) -> bool:
        """Whether a row needs the corpus of masked sentences (X)."""
        return any(STARTS[name].other_text for name in self.starts())

    # -- paths ----------------------------------------------------------------------------------------------------

    @property
    def kb(self) -> Path:
        return self.folder / "kb"

    @property
    def text_kb(self) -> Path:
        return self.folder / "text-kb"

    @property
    def reading_kb(self) -> Path:
        return self.folder / "reading-kb"

    def cut(self) -> dict[Path, tuple[str, ...]]:
        """File for the first documents of a corpus -> sources of the corpus; empty if all documents are used."""
        if not self.data.documents:
            return {}
        corpora = {self.kb: self.data.corpus} | ({self.text_kb: self.data.text} if self.uses_text else {})
        return {self._documents(kb): sources for kb, sources in corpora.items()}

    def _documents(self, kb: Path) -> Path:
        return self.folder / "documents" / f"{kb.name}.jsonl"

    def sources(self, kb: Path) -> tuple[str, ...]:
        """Sources from which `realm kb build` makes a knowledge base."""
        if kb == self.reading_kb:
            return self.data.reading.corpus
        if self.data.documents:
            return (str(self._documents(self.text_kb if kb == self.text_kb else self.kb)),)
        return self.data.text if kb == self.text_kb else self.data.corpus

    def questions(self, part: str) -> Path:
        """File with questions: for training ("train"), for choosing the best weights ("dev"), or of a test that is not given as
        a file. The questions of `data.reading` are in the files "reading-train" and "reading-dev"."""
        return self.folder / "questions" / f"{part}.jsonl"

    @property
    def made(self) -> Path:
        """Folder of the questions that are made from the corpus if no question files are given."""
        return self.folder / "questions" / "made"

    @property
    def datastore(self) -> Path:
        """Folder of the datastore and the report of kNN-LM."""
        return self.folder / "datastore"

    def named(self, name: str, seed: int) -> str:
        """The name, followed by the seed unless it is the first seed."""
        return name if seed == self.config.seeds[0] else f"{name}-{seed}"

    def start_model(self, name: str, seed: int) -> Path:
        """Folder of a start."""
        return self.folder / "models" / self.named_start(name, seed)

    def named_start(self, name: str, seed: int) -> str:
        """The name of a start or of BM25, followed by the seed if there is a file for each seed."""
        return self.named(name, seed) if self.has_seeds(name) else name

    def seeds_of(self, start: str) -> tuple[int, ...]:
        return self.config.seeds if self.has_seeds(start) else self.config.seeds[:1]

    @staticmethod
    def has_seeds(start: str) -> bool:
        """Whether a start depends on the seed. BM25, the encoders and the published model do not depend on the seed."""
        return start != BM25 and STARTS[start].made_by not in ("mlm", "published")

    def kb_of(self, start: str) -> Path:
        """The knowledge base from which a start retrieves."""
        return self.folder / "published-kb" if start == PUBLISHED else self.kb

    def reader(self, name: str, seed: int) -> Path | None:
        """Folder of the reader with which the training of a row starts. The reader was trained on the questions of
        `data.reading`, from the encoder of the start of the row.

        None if there is no such reader: the table has no such questions, or the row has a published model or a network that
        does not start from an encoder.
        """
        row = self.table[self.table[name].of or name]
        if not self.data.reading.questions or row.start == PUBLISHED or row.system in OWN_NETWORK:
            return None
        return self.folder / "readers" / self.named(encoder_of(row.start), seed)

    def row_model(self, name: str, seed: int) -> Path:
        """Folder of the trained system of a row."""
        if self.is_published_reader(self.table[name].start):
            return self.start_model(self.table[name].start, seed)
        return self.folder / "rows" / self.named(self.table[name].of or name, seed)

    def report(self, name: str, seed: int, test: str) -> Path:
        """Report on the answers of a row in a test."""
        return self.folder / "reports" / f"{self.named(name, seed)}.{test}.json"

    def retrieval(self, name: str, seed: int, test: str) -> Path:
        """Report on the retrieval of a start or of BM25 in a test."""
        return self.folder / "reports" / f"retrieval-{self.named_start(name, seed)}.{test}.json"

    def probe(self, name: str, seed: int) -> Path:
        """Report on a start or BM25 on masked facts."""
        return self.folder / "reports" / f"probe-{self.named_start(name, seed)}.json"

    def predictions(self, name: str, seed: int, test: str) -> Path:
        return self.folder / "predictions" / f"{self.named(name, seed)}.{test}.jsonl"

    def start_settings(self, name: str, seed: int) -> tuple[str, ...]:
        """Settings of the command that makes a start."""
        start = self.start(name)
        settings = (*start.settings, f"seed={seed}") if self.has_seeds(name) else start.settings
        if start.made_by == "pretrain" and start.stale > 1:
            settings += (f"refresh.every={self.pretrain.refresh.every * start.stale}",)
        if start.made_by == "pretrain" and self.pretrain.passage_encoder == "frozen":
            settings += (f"states={self.start_model(name, seed).parent / 'states'}",)
        return settings

    @property
    def reading_config(self) -> FinetuneConfig:
        """The settings with which readers are trained on the questions of `data.reading`, with the first seed."""
        return self._stage(FinetuneConfig, "finetune", self.reading_settings(self.config.seeds[0]))

    def reading_settings(self, seed: int) -> tuple[str, ...]:
        """Settings of the command that trains readers on the questions of `data.reading`."""
        return (*READING_SETTINGS, *self.data.reading.settings, f"seed={seed}")

    def probed(self) -> list[str]:
        """The starts that are measured on masked facts: all except a published model, which has another knowledge base."""
        return [name for name in self.starts() if name != PUBLISHED]

    @property
    def predicts_spans(self) -> bool:
        """Whether kNN-LM is compared with REALM. This comparison needs the start "realm", and is left out if only retrieval is
        measured."""
        return "realm" in self.starts() and self.config.answer_seeds > 0
