"""The Python interface of a workspace: questions and changes.

WORKSPACE/kb/           the knowledge base, with its index
WORKSPACE/model/        the model
WORKSPACE/report.json   the report of the last fit (`realm.workspace.report`)
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from realm.documents.reading import documents_of
from realm.errors import InputError, shown
from realm.folders import KB
from realm.hub import workspace_folder, workspace_part
from realm.model.calibration import Method
from realm.qa.answers import Answer, Answers, Hit, RankedPassage
from realm.qa.filling import Filled
from realm.qa.pipeline import AnswerConfig
from realm.settings import checked
from realm.store.add import AddResult
from realm.store.knowledge_base import DocumentEntry
from realm.text.corpus import Passage, passage_id
from realm.workspace.living import LivingKnowledge, Snapshot
from realm.workspace.report import MODEL, FitJson, read_report


class Workspace:
    """An open workspace: a knowledge base and its model. Changes by other processes take effect at the next call.

        workspace = realm.load("manual")
        answer = workspace.answer("when does the warranty end?")
        print(answer.text, answer.probability, answer.passage.title)

    Several threads may use the same workspace.
    """

    def __init__(self, folder: str | os.PathLike[str], config: AnswerConfig | None = None):
        """Opens the folder; `config` has the settings for answering.

        Raises:
            InputError: the folder is not a workspace, its knowledge base and model do not fit together, or a setting cannot be
                used.
        """
        self.folder = Path(folder).absolute()  # the process may change its current folder
        kb, model = (str(workspace_part(self.folder, part)) for part in (KB, MODEL))
        self._living = LivingKnowledge(
            kb, model, AnswerConfig() if config is None else checked(AnswerConfig, config)
        )

    def __repr__(self) -> str:
        return f"Workspace({str(self.folder)!r})"

    @property
    def report(self) -> FitJson | None:
        """The report of the last fit; None if the workspace has no report yet."""
        return read_report(self.folder)

    def answer(self, question: str, *, method: Method | None = None, where: str | None = None) -> Answer:
        """The best answer to a question, with its passage: `answer.passage.text[answer.start:answer.end] == answer.text`.

        The answer may be a guess; `answers(question).found` is True if its probability reaches the threshold.

        `method` finds the passages to read: by vectors ("dense"), by words ("bm25") or by both ("hybrid"). None: the method
        with which the model was calibrated, else "dense".

        With a filter `where`, such as "year >= 2020", only passages of documents that match the filter are read.

        Raises:
            InputError: there is no passage to read, the model has no span reader, the method is unknown, or the filter cannot
                be used.
        """
        return self.answers(question, method=method, where=where).best(str(self.folder / KB), where)

    def answers(self, question: str, *, method: Method | None = None, where: str | None = None) -> Answers:
        """The best answers to a question, none of which stands for a later one (`stands_for`), and all passages that were read.

        `method` and `where` have the same meaning as in `answer`.

        Raises:
            InputError: the model has no span reader, the method is unknown, or the filter cannot be used.
        """
        (found,) = self.answer_many([question], method=method, where=where)
        return found

    def answer_many(
        self, questions: Iterable[str], *, method: Method | None = None, where: str | None = None
    ) -> list[Answers]:
        """The answers to each question, as `answers` returns them. One call for many questions is faster than many calls.

        Raises:
            InputError: as `answers`.
        """
        if isinstance(questions, str):
            raise InputError("questions is one text: give a list of questions")
        texts = [_text(one, "a question") for one in questions]
        return self._now().answerer.answer_batch(texts, method, where=where) if texts else []

    def retrieve(
        self, question: str, top_k: int = 10, *, method: Method | None = None, where: str | None = None
    ) -> list[RankedPassage]:
        """The `top_k` best passages for a question; `probability` is p(z|x), normalised over these passages.

        `method` ranks the passages: "dense", "bm25" or "hybrid", as in `answer`. With a filter `where`, only passages that
        match the filter are ranked.

        Raises:
            InputError: the method is unknown, `top_k` is below 1, or the filter cannot be used.
        """
        return self._now().answerer.passages(_text(question, "the question"), top_k, method, where)

    def search(
        self, question: str, top_k: int = 10, *, method: Method | None = None, where: str | None = None
    ) -> list[Hit]:
        """The `top_k` best passages for a question, with the scores by which they were ranked.

        `method` and `where` have the same meaning as in `retrieve`.

        Raises:
            InputError: the method is unknown, `top_k` is below 1, or the filter cannot be used.
        """
        (found,) = self._now().answerer.hits([_text(question, "the question")], top_k, method, where)
        return found

    def read(self, question: str, passages: Sequence[Mapping[str, str]]) -> Answers:
        """The best answers to a question in the given passages `{"text", "title"?}`, which need not be in the workspace.

        `answer.passage.rank` is the position of the passage of an answer in `passages`, from 1 on. The reader reads only the
        beginning of a passage that is longer than its input.

        Raises:
            InputError: the model has no span reader, or a passage has no text.
        """
        given = [_title_and_text(one) for one in passages]
        read = [Passage(passage_id(title, text), "", title, text, (), ()) for title, text in given]
        return self._now().answerer.answer_passages(_text(question, "the question"), read)

    def fill(self, sentence: str, target: str | None = None) -> Filled:
        """The best words for each [MASK] of a sentence, and the effect of each passage on these words or on `target`."""
        return self._now().filler.fill(_text(sentence, "the sentence"), target)

    def add(self, records: Iterable[Mapping[str, Any]]) -> AddResult:
        """Adds documents `{"title"?, "text", "id"?}`; a document with a known id replaces the old document.

        All other keys of a record, and those of a mapping `metadata` or `fields`, are its fields. The id of a document without
        "id" is its title, or its field "url" if it has no title. If several documents of one call have the same title T and no
        "id", their ids are "T", "T (2)", "T (3)" and so on. On return, the documents are on disk and can be found.

        Raises:
            InputError: a record or one of its fields cannot be used, a text is longer than the setting `max_document_chars` of
                the knowledge base, or one record is given instead of a list of records.
        """
        if isinstance(records, Mapping):
            raise InputError("records is one record: give a list of records")
        most = self._living.current.kb.config.max_document_chars
        return self._living.add(list(documents_of(records, most)))

    def delete(self, ids: Sequence[str] | str) -> int:
        """Deletes documents by id, and returns the number of removed passages.

        Raises:
            InputError: an id is unknown; nothing is deleted.
        """
        given = [ids] if isinstance(ids, str) else ids
        return self._living.delete(*(_text(one, "an id") for one in given))

    def documents(self, prefix: str = "", *, where: str | None = None) -> list[DocumentEntry]:
        """The documents whose id or title begins with `prefix`, and that match the filter `where`."""
        return self._now().kb.documents(prefix=prefix, where=where)

    def _now(self) -> Snapshot:
        self._living.refresh()
        return self._living.current


def _text(given: object, name: str) -> str:
    if not isinstance(given, str):
        raise InputError(f"{name} is {shown(given)}: it must be a text")
    if not given.strip():
        raise InputError(f"{name} is empty")
    return given


def _title_and_text(passage: object) -> tuple[str, str]:
    if not isinstance(passage, Mapping):
        raise InputError(f"a passage is {shown(passage)}: it must be a mapping with a text")
    title = passage.get("title")
    return "" if title is None or title == "" else _text(title, "a title"), _text(
        passage.get("text"), "a text"
    )


def load(folder: str | os.PathLike[str], config: AnswerConfig | None = None) -> Workspace:
    """Opens a workspace that `realm fit` or `realm.fit` made, or `hf:OWNER/NAME` of the hub, which `realm share` made.

    A workspace of the hub is copied to a folder of its own. Changes are made in this copy, and not on the hub.

    Args:
        folder: the folder of the workspace, or `hf:OWNER/NAME`.
        config: settings for answering questions, such as `AnswerConfig(read=10)`. If None, the settings have their defaults.

    Raises:
        InputError: the folder is not a workspace, its knowledge base and model do not fit together, the knowledge base has no
            index of the model, a setting cannot be used, or the repository cannot be downloaded.
        DamagedError: a file of the workspace is damaged.
    """
    if not os.fspath(folder):
        raise InputError("the folder of the workspace is empty: give its name")
    return Workspace(workspace_folder(os.fspath(folder)), config)
