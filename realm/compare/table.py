"""Runs the stages of a table, and writes the report."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any, TypedDict, cast

from realm import __version__
from realm.compare import commands, layout, plots, results
from realm.compare.official import content_digest, recognised
from realm.compare.plan import MADE, READING, TablePlan
from realm.compare.questions import (
    Split,
    contents,
    held_out_questions,
    ordered_digest,
    read_all,
    split_questions,
)
from realm.documents.reading import read_documents
from realm.errors import DamagedError, InputError, shown
from realm.files import read_json, write_json, write_json_lines
from realm.keys import Lookup, key_of
from realm.progress import counted
from realm.qa.question_files import Question, read_questions
from realm.stages.memory import PeakMemory
from realm.stages.parallel import Chain, run_chains
from realm.stages.runner import Record, run_stages
from realm.store.knowledge_base import KnowledgeBase
from realm.train.run_folder import plain


def run(
    title: str, plan: TablePlan, run_command: Callable[[Sequence[str]], None], jobs: int = 1
) -> results.TableJson:
    """Makes a table, and writes the report and the tables -> the report. Stages that are already done are skipped.

    With one job, `run_command` runs the stages in this process; with several jobs, each stage is a process, and up to `jobs` of
    them run at the same time.

    Raises:
        InputError: a row, a corpus, a question file or the input of a stage cannot be used; or the folder was made with other
            data.
    """
    plan.check()
    rows, folder = plan.rows(), plan.folder
    print(f"{title}: {counted(len(rows), 'row')} ({', '.join(rows)}), in {folder}")
    if not plan.config.rows:
        for name, needed in plan.left_out().items():
            print(f'The row "{name}" is left out, because it needs {needed}.')
    if plan.data.documents:
        print(f"Only the first {plan.data.documents:,} documents are used.")
    print("Each line that begins with $ is a command that you can also run yourself.")
    print("You can stop the command at any time; the same command continues the work.")
    if jobs > 1:
        print(f"Up to {jobs} commands run at the same time. Their output is in {folder / 'logs'}.")
    split, named = _split(plan), _read_reading(plan)
    if split is not None and split.dropped:
        print(
            f"Training and dev questions that are left out because they are also in a test: {split.dropped:,}."
        )
    folder.mkdir(parents=True, exist_ok=True)
    data, data_file = _data(plan, split, named), folder / DATA
    if not data_file.exists():
        write_json(data_file, data)
    _write_documents(plan)
    with PeakMemory() as memory:
        commit = _commit(Path(__file__))
        record = Record(folder / "stages.json", memory, layout.version_line(__version__, commit))

        def run_all(chains: Iterable[Chain]) -> None:
            if jobs == 1:
                run_stages((stage for chain in chains for stage in chain.stages), record, run_command)
            else:
                run_chains(chains, record, folder / "logs", jobs)

        run_all(commands.preparing(plan))
        split = split or _split_made(plan)
        reading = _split_reading(plan, named, split)
        _write_questions(plan, split, reading)
        write_json(data_file, data)  # only now with added tests, because their questions can be refused
        run_all(commands.starting(plan))
        run_all(commands.reading(plan))
        run_all(commands.training(plan))
        run_all(commands.measuring(plan))
    report = results.read(plan, _made_by(plan, split, reading, jobs, commit, record))
    name = title.lower().replace(" ", "")  # both tables can be in the same folder
    write_json(folder / f"{name}.json", report)
    (folder / f"{name}.md").write_text(layout.markdown(report), encoding="utf-8")
    plots.draw(report, folder / f"{name}.png")
    width = shutil.get_terminal_size((0, 0)).columns if sys.stdout.isatty() else 0
    print("", *layout.lines(report, width), sep="\n")
    print(
        f"All numbers are in {folder / name}.json; the tables are in {folder / name}.md and {folder / name}.png."
    )
    return report


DATA = "data.json"


class DataJson(TypedDict):
    """Content of data.json: the data with which a folder was made."""

    corpus: list[str]
    text: list[str]
    documents: int
    encoder: str
    warm_start: bool
    first_seed: int
    """The seed whose files have no seed in their names."""
    questions: dict[str, str]
    """Name of a test, "train", "dev" or "reading" -> digest of the questions (`ordered_digest`). Tests, "train" and "dev" are
    listed if question files are given, and "reading" if a row with a reader was trained."""
    reading: list[str]
    """The setting `data.reading.corpus`, if a row with a reader was trained."""
    published: dict[str, str]
    """The settings of `data.published`."""
    settings: dict[str, Any]
    """Name, such as pretrain.refresh.every -> value, of all settings of the stages (`TablePlan.stages`) except those in `FREE`.

    The names that begin with data.reading.settings are all settings of the training of the readers."""


FREE = (
    "device",
    "threads",
    "engine",
    "ray_address",
    "cached_rows",
    "shard_weights",
    "log_every",
    "checkpoint_seconds",
    "tensorboard",
    "commit_every",
)
"""Settings that can change in a folder, because they say only where and how a stage runs."""


def _settings(plan: TablePlan) -> dict[str, Any]:
    """The value of `DataJson.settings`."""
    settings = {name: asdict(config) for name, config in plan.stages().items()}
    if plan.reads_first:
        settings["data.reading.settings"] = asdict(plan.reading_config)
    return {name: value for name, value in _flat(plain(settings)) if name.rpartition(".")[2] not in FREE}


def _flat(settings: Mapping[str, Any], table: str = "") -> Iterator[tuple[str, Any]]:
    """Name, such as pretrain.refresh.every, and value of each setting in nested tables."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{table}{key}.")
        else:
            yield f"{table}{key}", value


def _check_settings(plan: TablePlan, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises InputError if a setting differs. A setting that is new in a later version of realm is not compared, nor are the
    settings of a system that the folder did not have before."""
    for name, value in before.items():
        if name in now and now[name] != value:
            raise InputError(
                f"{plan.folder} was made with other settings ({name} was {shown(value)} and is now {shown(now[name])}): use "
                "another --dir, into which you can copy the knowledge bases and models that stay the same"
            )


def _data(plan: TablePlan, split: Split | None, reading: Sequence[tuple[str, Question]]) -> DataJson:
    """The content of data.json after this call.

    Raises:
        InputError: the folder was made with other data, whose results would be reported as results of these data.
    """
    data, file = plan.data, plan.folder / DATA
    tests = _tests(plan) if data.has_tests else {}
    asked = dict(tests)
    if split is not None:
        asked |= {"train": split.train, "dev": split.dev}
    if plan.trains_readers:
        asked[READING] = [question for _, question in reading]
    now: DataJson = {
        "corpus": list(data.corpus),
        "text": list(data.text),
        "documents": data.documents,
        "encoder": data.encoder,
        "warm_start": data.warm_start,
        "first_seed": plan.config.seeds[0],
        "questions": {
            name: ordered_digest(questions, name in data.tests) for name, questions in asked.items()
        },
        "reading": list(data.reading.corpus) if plan.trains_readers else [],
        "published": asdict(data.published),
        "settings": _settings(plan),
    }
    if file.exists():
        before = _read_data(file)
        parts = [
            key
            for key in (
                "corpus",
                "text",
                "documents",
                "encoder",
                "warm_start",
                "first_seed",
            )
            if before[key] not in (now[key], [])
        ]
        asked_before = before["questions"]
        # A test may be added later, but questions that were made from the corpus are not replaced by those of a file.
        parts += [key for key in ("train", "dev") if asked_before.get(key) != now["questions"].get(key)]
        parts += [
            key for key in tests if asked_before.get(key, now["questions"][key]) != now["questions"][key]
        ]
        if READING in asked_before and not plan.trains_readers:
            now["reading"] = before["reading"]
        elif READING in asked_before and (
            (asked_before[READING], before["reading"]) != (now["questions"][READING], now["reading"])
        ):
            parts.append(READING)
        if before["published"].get("checkpoint") and before["published"] != now["published"]:
            parts.append("published")
        if parts:
            raise InputError(
                f"{plan.folder} was made with other data ({', '.join(parts)}): use another --dir"
            )
        _check_settings(plan, before["settings"], now["settings"])
        now["settings"] = before["settings"] | now["settings"]
        now["questions"] = before["questions"] | now["questions"]
    return now


def _read_data(file: Path) -> DataJson:
    """The content of data.json.

    Raises:
        DamagedError: the file is damaged, or of another version of realm.
    """
    saved = read_json(file)
    if (
        not isinstance(saved, dict)
        or saved.keys() != DataJson.__required_keys__
        or not all(isinstance(saved[key], dict) for key in ("questions", "published", "settings"))
    ):
        raise DamagedError(
            f"{file} is damaged, or was written by another version of realm: put the file back, or use another --dir"
        )
    return cast(DataJson, saved)


def _write_documents(plan: TablePlan) -> None:
    """Writes the first documents of the corpora, if only these documents are used. Existing files are kept."""
    for file, sources in plan.cut().items():
        if not file.exists():
            file.parent.mkdir(exist_ok=True)
            first = islice(read_documents(sources, names=plan.names), plan.data.documents)
            keys = [own or usual for own, usual in zip(plan.names, ("title", "text", "id"), strict=True)]
            rows = (dict(zip(keys, (one.title, one.text, one.id), strict=True)) for one in first)
            write_json_lines(file, rows)  # under the names with which `realm kb build` reads the file


def _write_questions(plan: TablePlan, split: Split, reading: Split | None) -> None:
    """Writes the training and dev questions of the table and of `data.reading`, and the questions of tests that are not files.

    Existing files are kept.

    Raises:
        InputError: a file has other questions.
    """
    files = {plan.questions("train"): split.train, plan.questions("dev"): split.dev}
    if reading is not None:
        files[plan.questions(f"{READING}-train")] = reading.train
        files[plan.questions(f"{READING}-dev")] = reading.dev
    files |= {
        plan.tests()[name]: asked for name, asked in _tests(plan).items() if name not in plan.data.tests
    }
    written = {file for file in files if file.exists()}
    other = [
        file.stem
        for file in sorted(written)
        if contents(read_questions(file, regex=False)) != contents(files[file])
    ]
    if other:
        raise InputError(
            f"{plan.folder} was made with other questions ({', '.join(other)}), for example because a test was added that "
            "has one of these questions: use another --dir"
        )
    plan.questions("train").parent.mkdir(exist_ok=True)
    for file in files.keys() - written:
        write_json_lines(file, (question.to_json() for question in files[file]))


def _split(plan: TablePlan) -> Split | None:
    """The questions of the given files; None if questions are made from the corpus.

    Raises:
        InputError: no training question or no dev question is left, or a test of `data.held_out` has no question.
    """
    if not plan.data.train:
        return None
    for name, files in plan.data.held_out.items():
        if not held_out_questions(files):
            raise InputError(
                f"the test {name} has no question: give files with more questions in data.held_out.{name}"
            )
    held_out = {file for files in plan.data.held_out.values() for file in files}
    train, dev = read_all(plan.data.train, held_out), read_all(plan.data.dev)
    split = split_questions(train, dev, _test_questions(plan))
    for name, kept in (("train", split.train), ("dev", split.dev)):
        if not kept:
            raise InputError(f"no question is left for {name}: give files with more questions in data.{name}")
    return split


def _read_reading(plan: TablePlan) -> list[tuple[str, Question]]:
    """The questions of `data.reading`, each with the name of its file; empty if no row is trained on them.

    Raises:
        InputError: a question names no document.
    """
    named = read_all(plan.data.reading.questions) if plan.reads_first else []
    for name, question in named:
        if not question.document_id:
            raise InputError(
                f"data.reading: question {question.id} of {name} names no document: add a document_id"
            )
    return [(name, question._replace(passage_id="")) for name, question in named]


def _split_reading(plan: TablePlan, named: Sequence[tuple[str, Question]], split: Split) -> Split | None:
    """The questions of `data.reading` without those that are also in a test or in the dev questions; None if there are none.

    Raises:
        InputError: no training question or no dev question is left, or no question names a document of `data.reading.corpus`.
    """
    if not named:
        return None
    by_document = Lookup(KnowledgeBase.open(plan.reading_kb).document_keys_N)
    known = [one for one in named if len(by_document.all(key_of(one[1].document_id)))]
    if not known:
        raise InputError("data.reading: no question names a document of data.reading.corpus")
    if len(known) < len(named):
        print(
            f"Questions of data.reading that are left out because their document is not in the knowledge base: "
            f"{len(named) - len(known):,}."
        )
    reading = split_questions(known, [], [*_test_questions(plan), *split.dev])
    if not reading.train or not reading.dev:
        raise InputError(
            "data.reading: after a tenth is taken for dev, no question is left for train or for dev"
        )
    return reading


def _split_made(plan: TablePlan) -> Split:
    """The questions that were made from the corpus, without those that are also in a test file."""
    train, dev = (read_all([str(plan.made / f"{part}.jsonl")]) for part in ("train", "dev"))
    # The dev and test questions are about other documents than the training questions.
    return split_questions(train, dev[1::2], _test_questions(plan) if plan.data.has_tests else [])


def _tests(plan: TablePlan) -> dict[str, list[Question]]:
    """Name of a test -> its questions. Made questions are a test if no other test is given: half of those whose documents have
    no training questions."""
    if not plan.data.has_tests:
        return {MADE: read_questions(plan.made / "dev.jsonl")[::2]}
    given = {name: read_questions(file) for name, file in plan.data.tests.items()}
    return given | {name: held_out_questions(files) for name, files in plan.data.held_out.items()}


def _test_questions(plan: TablePlan) -> list[Question]:
    """The questions of all tests."""
    return [question for questions in _tests(plan).values() for question in questions]


def _made_by(
    plan: TablePlan, split: Split, reading: Split | None, jobs: int, commit: str | None, record: Record
) -> results.MadeBy:
    files = {**plan.tests(), "train": plan.questions("train"), "dev": plan.questions("dev")}
    if reading is not None:
        files[READING] = plan.questions(f"{READING}-train")
    asked = {name: read_questions(file) for name, file in files.items()}
    kb = KnowledgeBase.open(plan.kb)
    return {
        "realm": __version__,
        "commit": commit,
        "stages_by": record.versions(),
        "preset": plan.preset,
        "jobs": jobs,
        "seeds": list(plan.config.seeds),
        "answer_seeds": plan.config.answer_seeds,
        "settings": json.loads(
            json.dumps({**asdict(plan.config), "data": asdict(plan.data), **plan.changed})
        ),
        "stages": json.loads(json.dumps({name: asdict(config) for name, config in plan.stages().items()})),
        "passages": len(kb),
        "corpus": kb.fingerprint,
        "other_corpora": {
            folder.name: KnowledgeBase.open(folder).fingerprint
            for folder, is_used in ((plan.text_kb, plan.uses_text), (plan.reading_kb, plan.reads_first))
            if is_used
        },
        "questions": {
            name: {"n": len(questions), "digest": content_digest(questions), "name": recognised(questions)}
            for name, questions in asked.items()
        },
        "dropped": split.dropped + (reading.dropped if reading is not None else 0),
    }


def _commit(file: Path) -> str | None:
    """The commit of the checkout to which a file belongs, with "-dirty" if files differ from it; None without a checkout.

    A package that is installed in a folder of another checkout does not belong to that checkout.
    """

    def git(*words: str) -> str:
        found = subprocess.run(
            ["git", "-C", str(file.parent), *words], capture_output=True, text=True, timeout=30, check=True
        )
        return found.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", file.name)
        return git("describe", "--always", "--dirty", "--abbrev=12", "--exclude=*") or None
    except (OSError, subprocess.SubprocessError):
        return None
