"""Published question sets are recognised by content, not by file name or format. With --data, the published files are read."""

import hashlib
import json
from pathlib import Path

import pytest

from realm.compare import official
from realm.compare.questions import held_out_questions
from realm.qa.question_files import Question, read_questions

WEBQUESTIONS = ("webquestions/trainmodel.json", "webquestions/val.json", "webquestions/devtest.json")
TREC = ("curatedtrec/curatedtrec-train.tsv",)

SETS = {
    "NQ-open dev, which papers report as test": (("nq_open/NQ-open.dev.jsonl",), 3610),
    "WebQuestions trainmodel": (WEBQUESTIONS[:1], 2834),
    "WebQuestions val": (WEBQUESTIONS[1:2], 755),
    "WebQuestions devtest": (WEBQUESTIONS[2:], 189),
    "WebQuestions train": (WEBQUESTIONS, 3778),
    "CuratedTREC train": (TREC, 1486),
    "NQ dev of DPR and of ORQA's resplit": (("nq_train8k/questions.jsonl",), 8757),
}
"""Name of a published set -> its files in the folder of --data, and the number of its questions."""
RESPLIT = {
    "WebQuestions dev of ORQA's resplit": (WEBQUESTIONS, 361),
    "CuratedTREC dev of ORQA's resplit": (TREC, 133),
}
"""The same for the questions of the files that the rule of ORQA makes dev questions."""


@pytest.mark.parametrize("name", official.PUBLISHED.values())
def test_the_files_of_a_published_set_are_recognised(name: str, pytestconfig: pytest.Config) -> None:
    files, count = (SETS | RESPLIT)[name]
    folder = pytestconfig.getoption("--data")
    if not folder or not all((folder / file).exists() for file in files):
        pytest.skip(f"needs --data with {', '.join(files)}")
    paths = [str(folder / file) for file in files]
    if name in RESPLIT:
        questions = held_out_questions(paths)
    else:
        questions = [question for path in paths for question in read_questions(path)]
    assert (len(questions), official.recognised(questions)) == (count, name)


def test_the_published_sets_in_the_reports_of_the_docs_have_the_same_names_now() -> None:
    named = {}
    for file in (Path(__file__).parents[2] / "docs" / "tables").glob("*.json"):
        made_by = json.loads(file.read_text(encoding="utf-8"))["made_by"]
        named |= {one["digest"]: one["name"] for one in made_by["questions"].values() if one["name"]}
    assert len(named) == 3
    assert named.items() <= official.PUBLISHED.items()


@pytest.mark.parametrize(
    ("name", "text", "hashed"),
    [
        (
            "nq-open.jsonl",
            '{"question": "who wrote It", "answer": ["Bo", "Ann Lee"]}\n{"question": "when", "answer": ["1900"]}\n',
            "when\t1900\nwho wrote it\tAnn Lee\tBo",
        ),
        (
            "webquestions.json",
            '[{"qId": "w2", "qText": "who wrote It?", "answers": ["Bo", "Ann Lee"]},'
            ' {"qId": "w1", "qText": "when?", "answers": ["1900"]}]',
            "when?\t1900\nwho wrote it?\tAnn Lee\tBo",
        ),
        (
            "dpr.qa.csv",
            "who wrote It\t['Bo', 'Ann Lee']\nwhen\t['1900']\n",
            "when\t1900\nwho wrote it\tAnn Lee\tBo",
        ),
        (
            "curatedtrec.tsv",
            "894\tfactoid\tWho wrote it?\t(Ann )?Lee\n895\tfactoid\tWhen?\t19\\d\\d\n",
            "when?\t19\\d\\d\nwho wrote it?\t(Ann )?Lee",
        ),
        (
            "drqa.txt",
            '{"question": "Who wrote it?", "answer": ["(Ann )?Lee"]}\n{"question": "When?", "answer": ["19\\\\d\\\\d"]}\n',
            "when?\t19\\d\\d\nwho wrote it?\t(Ann )?Lee",
        ),
    ],
    ids=["nq-open", "webquestions", "dpr", "curatedtrec", "drqa"],
)
def test_a_digest_is_of_sorted_lines_of_a_question_in_lower_case_and_its_sorted_answers(
    name: str, text: str, hashed: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    found = official.content_digest(read_questions(tmp_path / name))
    assert found == hashlib.sha256(hashed.encode()).hexdigest()[:16]


def test_the_same_questions_have_one_digest_in_any_order_and_format(tmp_path: Path) -> None:
    lines = [
        {"question": "who wrote it?", "answers": ["ann", "bo"]},
        {"question": "when?", "answers": ["1900"]},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "b.tsv").write_text("When? \t['1900']\nwho wrote it?\t['bo', 'ann']\n")
    first, second = (read_questions(tmp_path / name) for name in ("a.jsonl", "b.tsv"))
    assert official.content_digest(first) == official.content_digest(second)
    assert official.content_digest(first[:1]) != official.content_digest(first)
    assert official.content_digest(
        [first[0]._replace(answers=("ann",)), first[1]]
    ) != official.content_digest(first)


def test_a_published_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    questions = [Question("1", "who?", ("x",))]
    assert official.recognised(questions) is None
    monkeypatch.setitem(official.PUBLISHED, official.content_digest(questions), "a published set")
    assert official.recognised(questions) == "a published set"
