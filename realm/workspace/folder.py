"""A workspace on disk, open for questions and changes.

WORKSPACE/kb/           the knowledge base, with its index
WORKSPACE/model/        the model that answers
WORKSPACE/report.json   what the last fit found (`realm.workspace.report`)
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from realm.errors import InputError
from realm.folders import restore
from realm.model.calibration import Method
from realm.qa.answers import Answer, Answers, RankedPassage
from realm.qa.filling import Filled
from realm.qa.pipeline import AnswerConfig
from realm.store.add import AddResult
from realm.store.knowledge_base import DocumentEntry
from realm.text.readers import documents_of
from realm.workspace.living import LivingKnowledge, Snapshot
from realm.workspace.report import KB, MODEL, FitJson, read_report


class Workspace:
    """A knowledge base and its model, ready for questions; what other processes change in it is taken up.

        workspace = realm.load("manual")
        answer = workspace.answer("how do I reset the device?")
        print(answer.text, answer.probability, answer.passage.title)

    Several threads may ask at once.
    """

    def __init__(self, folder: str | os.PathLike[str], config: AnswerConfig | None = None):
        """Opens the folder; `config` says how questions are answered.

        Raises:
            InputError: it is no workspace, or its parts do not belong together.
        """
        self.folder = Path(folder)
        for part in (KB, MODEL):
            restore(self.folder / part)
            if not (self.folder / part).is_dir():
                raise InputError(
                    f"{self.folder} is no workspace, it has no folder {part}: `realm fit SOURCE... --out {self.folder}` "
                    "or `realm.fit` makes one"
                )
        self._living = LivingKnowledge(
            str(self.folder / KB), str(self.folder / MODEL), config or AnswerConfig()
        )

    def __repr__(self) -> str:
        return f"Workspace({str(self.folder)!r})"

    @property
    def report(self) -> FitJson | None:
        """What the last fit found; none where the fit has not got so far."""
        return read_report(self.folder)

    def answer(self, question: str, *, method: Method | None = None) -> Answer:
        """The best answer to a question, with its passage: `answer.passage.text[answer.start:answer.end] == answer.text`.

        It may be a guess: `answers(question).found` says whether its probability reaches the model's threshold.

        Raises:
            InputError: the knowledge base has no passage to read, or the model no span reader.
        """
        found = self.answers(question, method=method).answers
        if not found:
            raise InputError(f"no answer: {self.folder / KB} has no passage to read")
        return found[0]

    def answers(self, question: str, *, method: Method | None = None) -> Answers:
        """The best different answers to a question, and all passages that were read for them."""
        (found,) = self._now().answerer.answer_batch([question], method)
        return found

    def retrieve(
        self, question: str, top_k: int = 10, *, method: Method | None = None
    ) -> list[RankedPassage]:
        """The best passages for a question; `probability` is a passage's share of p(z|x) among them."""
        return self._now().answerer.passages(question, top_k, method)

    def fill(self, sentence: str, target: str | None = None) -> Filled:
        """The best words for each [MASK] of a sentence, and what each passage did for them, or for the `target`."""
        return self._now().filler.fill(sentence, target)

    def add(self, records: Iterable[Mapping[str, Any]]) -> AddResult:
        """Adds documents `{"title", "text", "id"?}`; one whose id is known takes the place of the old one.

        Without an id the title is the id. When this returns, the documents are on disk and found.
        """
        return self._living.add(list(documents_of(records)))

    def delete(self, ids: Sequence[str] | str) -> int:
        """Deletes documents by id -> how many passages went with them; all of them, or none where an id is not known."""
        return self._living.delete(*([ids] if isinstance(ids, str) else ids))

    def documents(self, prefix: str = "") -> list[DocumentEntry]:
        """The documents whose id or title begins so."""
        return self._now().kb.documents(prefix=prefix)

    def _now(self) -> Snapshot:
        self._living.refresh()
        return self._living.current


def load(folder: str | os.PathLike[str], config: AnswerConfig | None = None) -> Workspace:
    """Opens a workspace that `realm fit` or `realm.fit` made."""
    return Workspace(folder, config)
