"""Stages of `realm demo`: the commands in their order, and the text of each section.

The stages make a workspace from documents, compare its retrievers, add more documents and adapt the workspace to them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from realm.documents.readers import read_documents
from realm.files import read_json, write_json_lines
from realm.stages.runner import Section, Stage
from realm.workspace.report import KB, REPORT, FitJson
from realm.workspace.settings import FitConfig


class Asked(NamedTuple):
    """A question of section 5."""

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
"""Questions of section 5, fixed before the model had answered any of them."""


@dataclass(frozen=True)
class DemoConfig:
    """Settings of the demo. Each stage has its own table in the same configuration file."""

    source: str = "package:vital-articles"
    """The first documents."""
    later: str = "package:factbook"
    """The documents that are added later."""
    later_parts: tuple[str, ...] = ("Introduction",)
    """Only add those later documents whose id ends with one of these; empty: add all."""
    start: str = "package:realm-small"
    """The model to start from."""
    minutes: float = 1.0
    """Time limit of the first adaptation, in minutes."""
    later_minutes: float = 1.25
    """Time limit of the second adaptation, in minutes; `realm fit` only adapts again with more time than before."""
    questions: int = 150
    """Largest number of questions made from the first documents."""
    fill: str = "The [MASK] is the currency of the United Kingdom."
    """The masked sentence of section 6."""

    def __post_init__(self) -> None:
        if not 0 < self.minutes < self.later_minutes:
            raise ValueError(
                f"minutes is {self.minutes:g}, later_minutes {self.later_minutes:g}: minutes must be above 0 and less"
            )
        if self.questions < 1:
            raise ValueError(f"questions is {self.questions}: it must be 1 or more")


FIT = Section(
    "1. Make a workspace from documents",
    "`realm fit` splits the documents into passages of about 80 words, marks names and dates in them, and computes a vector\n"
    "for each passage. The workspace can then answer questions. After that, `realm fit` adapts the retriever to the documents\n"
    "without labels: it masks a name or date in a sentence, retrieves passages, and trains the retriever to rank those\n"
    "passages higher that help the reader to predict the masked words. The adapted retriever replaces the start only if it\n"
    "finds more.",
)
MEASURE = Section(
    "2. Compare the retrievers",
    "The questions were made from the documents by rules. The same reader answers each question from the five best passages\n"
    "of each retriever: BM25 (words only), start (the model before adaptation; realm-small has the vectors of MiniLM),\n"
    "adapted (if it was kept), and hybrid (BM25 and vectors together, the method by which the workspace answers).",
)
ADAPT = Section(
    "4. Adapt to the new documents",
    "`realm fit` with both sources processes only the documents that changed, then adapts the retriever to all documents,\n"
    "for longer than before. Then the same questions are asked again.",
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
        """Short name of the later documents."""
        return self.config.later.removeprefix("package:").rpartition("/")[2].partition(".")[0]

    @property
    def later(self) -> Path:
        """File with the later documents."""
        return self.folder / f"{self.name}.jsonl"

    @property
    def first_fit(self) -> Path:
        """Report of the first `realm fit`."""
        return self.folder / "reports" / "fit.json"

    def outcome(self, name: str) -> Path:
        """File with a report of `realm evaluate` and the outcome of each question."""
        return self.folder / "reports" / f"{name}.json"

    def retrievers(self) -> tuple[str, ...]:
        """Retrievers of section 2; the adapted one only if the first fit kept it."""
        fit: FitJson = read_json(self.first_fit)
        kept = fit["adaptation"] is not None and fit["adaptation"]["kept"]
        return ("bm25", "start", "adapted") if kept else ("bm25", "start")

    # -- the commands ---------------------------------------------------------------------------------------------

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
        section = Section(
            "3. Add documents",
            f"{self.later} contains {self._description_of_later()}, one JSON object per line. `realm kb add` adds them to the "
            "knowledge base without any training. Then questions made only from the new documents are asked.",
        )
        inside, out = ("--in", str(self.workspace)), self.folder / "questions"
        yield Stage(section, "kb add", self._command("kb add", str(self.later), *inside), once=True)
        about = ("--set", f"documents={self.name}/", "--set", "dev_share=1.0")
        questions = self._command("questions", *inside, "--out", str(out), *about)
        yield Stage(section, "questions", questions, once=True)
        yield self._evaluate(section, "later-bm25", "bm25", out / "dev.jsonl")
        yield self._evaluate(section, "later-before", "dense", out / "dev.jsonl")

    def _write_later(self) -> None:
        """Writes the later documents as JSON Lines."""
        write_json_lines(
            self.later,
            (
                {"id": f"{self.name}/{document.id}", "title": document.title, "text": document.text}
                for document in read_documents([self.config.later], FitConfig.max_document_chars)
                if not self.config.later_parts or document.id.endswith(self.config.later_parts)
            ),
        )

    def _description_of_later(self) -> str:
        parts = f" ({', '.join(self.config.later_parts)})" if self.config.later_parts else ""
        return f"documents of {self.config.later}{parts}"

    def adapting(self) -> Iterator[Stage]:
        """Stages of section 4."""
        fit = self._fit(self.config.later_minutes, self.config.source, str(self.later))
        yield Stage(
            ADAPT, "fit again", fit, self.outcome("fit-again"), once=True, keeps=self.workspace / REPORT
        )
        asked = self.folder / "questions" / "dev.jsonl"
        yield self._evaluate(ADAPT, "later-after", "dense", asked)
        yield self._evaluate(ADAPT, "later-hybrid", "hybrid", asked)

    def answer(self, question: str) -> tuple[str, ...]:
        """Command for one question of section 5, without `realm`."""
        return self._command("answer", question, "--in", str(self.workspace), "--set", "answers=1")

    def fill(self) -> tuple[str, ...]:
        """Command for the masked sentence of section 6, without `realm`."""
        return self._command("fill", self.config.fill, "--in", str(self.workspace))

    def _fit(self, minutes: float, *sources: str) -> tuple[str, ...]:
        start = () if self.config.start == FitConfig.start else ("--start", self.config.start)
        most = ("--set", f"questions={self.config.questions}")
        words = (*sources, "--out", str(self.workspace), "--minutes", f"{minutes:g}", *start, *most)
        return self._command("fit", *words)

    def _evaluate(self, section: Section, name: str, method: str, asked: Path, *where: str) -> Stage:
        """`realm evaluate` on the workspace, or on the knowledge base and model that the flags `where` name."""
        out, inside = self.outcome(name), where or ("--in", str(self.workspace))
        words = (*inside, "--method", method, "--questions", str(asked), "--out", str(out))
        argv = self._command("evaluate", *words, "--set", "precision=auto")
        return Stage(section, f"evaluate {name}", argv, out, once=True, quiet=True)

    def _command(self, verb: str, *words: str) -> tuple[str, ...]:
        """Arguments of `realm` for a command, with --config if there is one."""
        config = () if self.preset is None else ("--config", self.preset)
        return (*verb.split(), *words, *(() if verb == "kb add" else config))
