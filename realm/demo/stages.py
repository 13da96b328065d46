"""Stages of `realm demo`: the commands in their order, and the explanation of each section.

The stages make a workspace from documents, compare its retrievers, add more documents and adapt the workspace to them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from realm.documents.reading import read_documents
from realm.files import read_json, write_json_lines
from realm.folders import KB
from realm.stages.runner import Section, Stage
from realm.workspace.report import REPORT, FitJson
from realm.workspace.settings import FitConfig


class Asked(NamedTuple):
    """A question of section 5, with its answer."""

    question: str
    expected: str
    """The answer in the documents."""
    right: str
    """Words that every right answer contains."""


QUESTIONS = (
    Asked("Who painted the Mona Lisa?", "Leonardo da Vinci", "Leonardo"),
    Asked("Who discovered penicillin?", "Alexander Fleming", "Fleming"),
    Asked("Who was the first person to walk on the Moon?", "Neil Armstrong", "Armstrong"),
    Asked("When was the Berlin Wall built?", "1961", "1961"),
    Asked("When was the Eiffel Tower built?", "1887 to 1889", "1889"),
    Asked("Where is Machu Picchu?", "Peru", "Peru"),
    Asked("Where is the Sahara?", "North Africa", "Africa"),
    Asked("How high is Mount Everest?", "8,848.86 m", "8,848.86 m"),
    Asked("How many people live in Iceland?", "roughly 395,000", "395,000"),
    Asked("What is the highest mountain in Kenya?", "Mount Kenya", "Mount Kenya"),
)
"""Questions of section 5. They were chosen before the model answered any of these questions."""
SENTENCE = "The [MASK] is the currency of the United Kingdom."
"""The masked sentence of the last section."""
FACTBOOK, FACTBOOK_PART = "package:factbook", "Introduction"
"""From the factbook, only documents whose id ends with `FACTBOOK_PART` are added; from other sources, all documents."""
MADE_QUESTIONS = 150
"""Largest number of questions that `realm fit` makes from the documents."""
MORE_TIME = 1.25
"""Time limit of the second adaptation divided by that of the first: `realm fit` adapts again only with a longer time limit."""


@dataclass(frozen=True)
class DemoConfig:
    """Settings of the demo. The commands of the stages have their own tables in the same configuration file."""

    source: str = "package:vital-articles"
    """Documents from which the workspace is made."""
    later: str = FACTBOOK
    """Documents that are added to the workspace later."""
    start: str = "package:realm-small"
    """The model to start from."""
    minutes: float = 1.0
    """Time limit of the first adaptation, in minutes."""

    def __post_init__(self) -> None:
        if not self.minutes > 0:
            raise ValueError(f"minutes is {self.minutes:g}: it must be above 0")


FIT = Section(
    "1. Make a workspace from documents",
    "`realm fit` splits the documents into passages of about 80 words, marks names and dates in them, and computes a vector\n"
    "for each passage. The workspace can then answer questions. After that, `realm fit` adapts the retriever to the documents\n"
    "without labels: it masks a name or date in a sentence, retrieves passages, and trains the retriever to rank passages\n"
    "higher if they help the reader to predict the masked words. The adapted retriever replaces the start model only if\n"
    "the adapted retriever finds more.",
)
MEASURE = Section(
    "2. Compare the retrievers",
    "The questions were made from the documents by rules. The same reader answers each question from the five best passages\n"
    "of each retriever: BM25 (words only), start (the model before adaptation; realm-small has the vectors of MiniLM),\n"
    "adapted (only if the adapted retriever was kept), and hybrid (BM25 and vectors together, as the workspace answers).",
)
ADAPT = Section(
    "4. Adapt to the new documents",
    "`realm fit` with both sources reads all documents, finds that none has changed since section 3, and adapts the retriever\n"
    "to all of them, with a longer time limit than before. After that, the questions of section 3 are asked again.",
)


@dataclass(frozen=True)
class DemoRun:
    """A demo in its folder: the paths of its files, and the commands of its stages."""

    config: DemoConfig
    preset: str | None
    """Configuration file or preset of every stage; None: default settings."""
    folder: Path

    @property
    def workspace(self) -> Path:
        return self.folder / "workspace"

    @property
    def name(self) -> str:
        """Short name for the documents that are added later."""
        return self.config.later.removeprefix("package:").rpartition("/")[2].partition(".")[0]

    @property
    def later(self) -> Path:
        """File with the documents that are added later."""
        return self.folder / f"{self.name}.jsonl"

    @property
    def first_fit(self) -> Path:
        """Report of the first `realm fit`."""
        return self.folder / "reports" / "fit.json"

    def outcome(self, name: str) -> Path:
        """File with a report of `realm evaluate` and the outcome of each question."""
        return self.folder / "reports" / f"{name}.json"

    def retrievers(self) -> tuple[str, ...]:
        """Retrievers of section 2, without "hybrid". "adapted" is included only if the first fit kept the adapted retriever."""
        fit: FitJson = read_json(self.first_fit)
        kept = fit["adaptation"] is not None and fit["adaptation"]["kept"]
        return ("bm25", "start", "adapted") if kept else ("bm25", "start")

    def fitting(self) -> Iterator[Stage]:
        """Stages of section 1."""
        fit = self._fit(self.config.minutes, self.config.source)
        yield Stage(FIT, "fit", fit, self.first_fit, once=True, keeps=self.workspace / REPORT)

    def measuring(self) -> Iterator[Stage]:
        """Stages of section 2."""
        asked = self.workspace / "questions.jsonl"
        start = ("--kb", str(self.workspace / KB), "--model", self.config.start)
        yield self._evaluate(MEASURE, "articles-bm25", "bm25", asked)
        yield self._evaluate(MEASURE, "articles-start", "dense", asked, *start)
        if "adapted" in self.retrievers():
            yield self._evaluate(MEASURE, "articles-adapted", "dense", asked)
        yield self._evaluate(MEASURE, "articles-hybrid", "hybrid", asked)

    def adding(self) -> Iterator[Stage]:
        """Stages of section 3."""
        if not self.later.exists():
            self._write_later()
        part = f" ({FACTBOOK_PART})" if self.config.later == FACTBOOK else ""
        section = Section(
            "3. Add documents",
            f"{self.later} contains documents of {self.config.later}{part}, one JSON object per line. `realm kb add` adds "
            "these documents to the knowledge base without any training. Then questions made from the new documents are "
            "asked.",
        )
        inside, out = ("--in", str(self.workspace)), self.folder / "questions"
        yield Stage(section, "kb add", self._command("kb add", str(self.later), *inside), once=True)
        about = ("--set", f"documents={self.name}/", "--set", "dev_share=1.0")
        questions = self._command("questions", *inside, "--out", str(out), *about)
        yield Stage(section, "questions", questions, once=True)
        yield self._evaluate(section, "later-bm25", "bm25", out / "dev.jsonl")
        yield self._evaluate(section, "later-before", "dense", out / "dev.jsonl")

    def _write_later(self) -> None:
        """Writes the documents that are added later as JSON Lines."""
        write_json_lines(
            self.later,
            (
                {"id": f"{self.name}/{document.id}", "title": document.title, "text": document.text}
                for document in read_documents([self.config.later], FitConfig.max_document_chars)
                if self.config.later != FACTBOOK or document.id.endswith(FACTBOOK_PART)
            ),
        )

    def adapting(self) -> Iterator[Stage]:
        """Stages of section 4."""
        fit = self._fit(MORE_TIME * self.config.minutes, self.config.source, str(self.later))
        yield Stage(
            ADAPT, "fit again", fit, self.outcome("fit-again"), once=True, keeps=self.workspace / REPORT
        )
        asked = self.folder / "questions" / "dev.jsonl"
        yield self._evaluate(ADAPT, "later-after", "dense", asked)
        yield self._evaluate(ADAPT, "later-hybrid", "hybrid", asked)

    def answer(self, question: str) -> tuple[str, ...]:
        """Arguments of `realm` for one question of section 5."""
        return self._command("answer", question, "--in", str(self.workspace), "--set", "answers=1")

    def fill(self) -> tuple[str, ...]:
        """Arguments of `realm` for the masked sentence of section 6."""
        return self._command("fill", SENTENCE, "--in", str(self.workspace))

    def _fit(self, minutes: float, *sources: str) -> tuple[str, ...]:
        start = () if self.config.start == FitConfig.start else ("--start", self.config.start)
        most = ("--set", f"questions={MADE_QUESTIONS}")
        words = (*sources, "--out", str(self.workspace), "--minutes", f"{minutes:g}", *start, *most)
        return self._command("fit", *words)

    def _evaluate(self, section: Section, name: str, method: str, asked: Path, *where: str) -> Stage:
        """Stage that runs `realm evaluate` on the workspace, or on the knowledge base and model given by the flags `where`."""
        out, inside = self.outcome(name), where or ("--in", str(self.workspace))
        words = (*inside, "--method", method, "--questions", str(asked), "--out", str(out))
        argv = self._command("evaluate", *words, "--set", "precision=auto")
        return Stage(section, f"evaluate {name}", argv, out, once=True, quiet=True)

    def _command(self, verb: str, *words: str) -> tuple[str, ...]:
        """Arguments of `realm` for a command, with --config if `preset` is not None."""
        config = () if self.preset is None else ("--config", self.preset)
        return (*verb.split(), *words, *(() if verb == "kb add" else config))
