"""The demo of a workspace: which commands, in which order, and what each is for.

Documents become a workspace, its retrievers are compared, other documents come and the workspace is adapted to them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from realm.demo.runner import Section, Stage
from realm.files import read_json, write_json_lines
from realm.text.readers import read_documents
from realm.workspace.report import KB, REPORT, FitJson
from realm.workspace.settings import FitConfig


class Asked(NamedTuple):
    """A question that a person would ask."""

    question: str
    expected: str
    """What the texts say."""
    right: str
    """The words that a right answer contains."""


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
"""Asked at the end. They were fixed before any answer was seen."""


@dataclass(frozen=True)
class DemoConfig:
    """What the demo does; how a stage does it is in the stage's own table of the same file."""

    source: str = "package:vital-articles"
    """The documents that it begins with."""
    later: str = "package:factbook"
    """The documents that come later."""
    later_parts: tuple[str, ...] = ("Introduction",)
    """Of these, the ones whose id ends so; none: all of them."""
    start: str = "package:realm-small"
    """The model that answers at first, and that is adapted."""
    minutes: float = 1.0
    """How long the first adaptation may take."""
    later_minutes: float = 1.25
    """How long the second one may take; `realm fit` makes none that has no more time than the one before."""
    questions: int = 150
    """Most questions made from the first documents that are asked."""
    fill: str = "The [MASK] is the currency of the United Kingdom."
    """The sentence that `realm fill` completes at the end."""

    def __post_init__(self) -> None:
        if not 0 < self.minutes < self.later_minutes:
            raise ValueError(
                f"minutes is {self.minutes:g}, later_minutes {self.later_minutes:g}: both must be above 0, the second longer"
            )
        if self.questions < 1:
            raise ValueError(f"questions is {self.questions}: it must be 1 or more")


FIT = Section(
    "1. Documents become a workspace",
    "`realm fit` cuts the documents into passages of about 80 words, marks names and dates in them, and turns each passage\n"
    "into a vector. From then on the workspace answers. Then the retriever is adapted to the documents, without labels: a\n"
    "name is hidden in a sentence, passages are retrieved, and those that help the reader to fill the gap should be found\n"
    "sooner. The adapted retriever is kept only if it finds more than the start.",
)
MEASURE = Section(
    "2. Is it any good?",
    "The questions were made from the articles by rules. The same reader answers them from the five best passages of each\n"
    "retriever: BM25 (words alone), the start (realm-small as it comes, with the vectors of MiniLM), the adapted one, and\n"
    "hybrid: BM25 and vectors together, by which the workspace answers.",
)
ADAPT = Section(
    "4. Adapted to the new documents",
    "`realm fit` of both sources: only what has changed is read again, and the retriever is adapted to all the text, for\n"
    "longer than before. Then the same questions are asked again.",
)


@dataclass(frozen=True)
class DemoRun:
    """The folder where all of it is."""

    config: DemoConfig
    preset: str | None
    """The configuration file, or preset by name, of every stage."""
    folder: Path

    @property
    def workspace(self) -> Path:
        return self.folder / "workspace"

    @property
    def name(self) -> str:
        """Of the documents that come later."""
        return self.config.later.removeprefix("package:").rpartition("/")[2].partition(".")[0]

    @property
    def later(self) -> Path:
        """The documents that come later, as a file."""
        return self.folder / f"{self.name}.jsonl"

    @property
    def first_fit(self) -> Path:
        """What the first fit reported."""
        return self.folder / "reports" / "fit.json"

    def outcome(self, name: str) -> Path:
        """A report of `realm evaluate`, with each question's outcome."""
        return self.folder / "reports" / f"{name}.json"

    def retrievers(self) -> tuple[str, ...]:
        """What the first table compares: the adapted retriever only where the first fit kept it."""
        fit: FitJson = read_json(self.first_fit)
        kept = fit["adaptation"] is not None and fit["adaptation"]["kept"]
        return ("bm25", "start", "adapted") if kept else ("bm25", "start")

    # -- the commands ---------------------------------------------------------------------------------------------

    def fitting(self) -> Iterator[Stage]:
        """Section 1."""
        fit = self._fit(self.config.minutes, self.config.source)
        yield Stage(FIT, "fit", fit, self.first_fit, once=True, keeps=self.workspace / REPORT)

    def measuring(self) -> Iterator[Stage]:
        """Section 2."""
        asked = self.workspace / "questions.jsonl"
        start = ("--kb", str(self.workspace / KB), "--model", self.config.start)
        yield self._evaluate(MEASURE, "articles-bm25", "bm25", asked)
        yield self._evaluate(MEASURE, "articles-start", "dense", asked, *start)
        if "adapted" in self.retrievers():
            yield self._evaluate(MEASURE, "articles-adapted", "dense", asked)
        yield self._evaluate(MEASURE, "articles-hybrid", "hybrid", asked)

    def adding(self) -> Iterator[Stage]:
        """Section 3."""
        if not self.later.exists():
            self._write_later()
        section = Section(
            "3. Documents that come later",
            f"{self.later} holds {self._what_comes_later()}, one JSON object to a line. `realm kb add` adds them to the "
            "knowledge base; nothing is trained. Questions made from the new documents alone are asked at once.",
        )
        inside, out = ("--in", str(self.workspace)), self.folder / "questions"
        yield Stage(section, "kb add", self._command("kb add", str(self.later), *inside), once=True)
        about = ("--set", f"documents={self.name}/", "--set", "dev_share=1.0")
        questions = self._command("questions", *inside, "--out", str(out), *about)
        yield Stage(section, "questions", questions, once=True)
        yield self._evaluate(section, "later-bm25", "bm25", out / "dev.jsonl")
        yield self._evaluate(section, "later-before", "dense", out / "dev.jsonl")

    def _write_later(self) -> None:
        """Writes the documents that come later as JSON Lines."""
        write_json_lines(
            self.later,
            (
                {"id": f"{self.name}/{document.id}", "title": document.title, "text": document.text}
                for document in read_documents([self.config.later], FitConfig.max_document_chars)
                if not self.config.later_parts or document.id.endswith(self.config.later_parts)
            ),
        )

    def _what_comes_later(self) -> str:
        parts = f" ({', '.join(self.config.later_parts)})" if self.config.later_parts else ""
        return f"documents of {self.config.later}{parts}"

    def adapting(self) -> Iterator[Stage]:
        """Section 4."""
        fit = self._fit(self.config.later_minutes, self.config.source, str(self.later))
        yield Stage(
            ADAPT, "fit again", fit, self.outcome("fit-again"), once=True, keeps=self.workspace / REPORT
        )
        asked = self.folder / "questions" / "dev.jsonl"
        yield self._evaluate(ADAPT, "later-after", "dense", asked)
        yield self._evaluate(ADAPT, "later-hybrid", "hybrid", asked)

    def answer(self, question: str) -> tuple[str, ...]:
        """Section 5: the command for one question."""
        return self._command("answer", question, "--in", str(self.workspace), "--set", "answers=1")

    def fill(self) -> tuple[str, ...]:
        """Section 5: the command for a masked sentence."""
        return self._command("fill", self.config.fill, "--in", str(self.workspace))

    def _fit(self, minutes: float, *sources: str) -> tuple[str, ...]:
        start = () if self.config.start == FitConfig.start else ("--start", self.config.start)
        most = ("--set", f"questions={self.config.questions}")
        words = (*sources, "--out", str(self.workspace), "--minutes", f"{minutes:g}", *start, *most)
        return self._command("fit", *words)

    def _evaluate(self, section: Section, name: str, method: str, asked: Path, *where: str) -> Stage:
        """Of the workspace, unless it says `where` the knowledge base and the model are."""
        out, inside = self.outcome(name), where or ("--in", str(self.workspace))
        words = (*inside, "--method", method, "--questions", str(asked), "--out", str(out))
        argv = self._command("evaluate", *words, "--set", "precision=auto")
        return Stage(section, f"evaluate {name}", argv, out, once=True, quiet=True)

    def _command(self, verb: str, *words: str) -> tuple[str, ...]:
        """The words behind `realm`, as they are typed."""
        config = () if self.preset is None else ("--config", self.preset)
        return (*verb.split(), *words, *(() if verb == "kb add" else config))
