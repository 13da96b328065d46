"""Question files of all formats are read, or refused in one line."""

import bz2
import contextlib
import csv
import gzip
import io
import json
import lzma
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from realm.documents.formats import compressed
from realm.errors import InputError
from realm.qa.question_files import Question, read_questions
from realm.qa.scoring.metrics import (
    has_answer,
    is_correct,
)
from tests.conftest import Trials


def written(tmp_path: Path, text: str | bytes, name: str = "q.jsonl") -> Path:
    path = tmp_path / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


@pytest.mark.parametrize(
    ("line", "question"),
    [
        ('{"question": "who?", "answers": ["a", "b"]}', Question("1", "who?", ("a", "b"))),
        ('{"id": 7, "question": " who? ", "answer": ["a", "a"]}', Question("7", "who?", ("a",))),  # NQ-Open
        ('{"question": "who?", "answer": "a", "hints": 3}', Question("1", "who?", ("a",))),
        (
            '{"id": "x", "question": "q", "answers": ["a|b"], "answers_are_regex": true, "gold_titles": ["T"]}',
            Question("x", "q", ("a|b",), regex=True, gold_titles=("T",)),
        ),
        ('{"question": "q", "answers": ["^a"], "regex": true}', Question("1", "q", ("^a",), regex=True)),
        ("who wrote it?\tann", Question("1", "who wrote it?", ("ann",))),
        ("who wrote it?\t['ann', \"o'neil\"]", Question("1", "who wrote it?", ("ann", "o'neil"))),  # DPR
        ('who wrote it?\t"[""o\'neil"", \'ann\']"', Question("1", "who wrote it?", ("o'neil", "ann"))),
        (
            'lfb3\tfactoid\twho wrote "it"?\tJ\\.? King',
            Question("lfb3", 'who wrote "it"?', ("J\\.? King",), regex=True),
        ),
    ],
)
def test_every_published_format_is_recognised_by_content(tmp_path: Path, line: str, question: Any) -> None:
    for ending in ("", "\n", "\r\n", "\n\n"):
        assert read_questions(written(tmp_path, line + ending, "q.txt")) == [question]


@pytest.mark.parametrize("name", ["q.jsonl.GZ", "q.tsv.bz2", "q.json.xz", "q.tsv.zst"])
def test_compressed_files_are_read_as_their_content_and_refused_if_cut(tmp_path: Path, name: str) -> None:
    compress = {
        ".gz": gzip.compress,
        ".bz2": bz2.compress,
        ".xz": lzma.compress,
        ".zst": lambda data: pa.compress(data, codec="zstd", asbytes=True),
    }[Path(name).suffix.lower()]
    text = "[who?]\tann\n" if ".tsv" in name else '{"question": "who?", "answers": ["ann"]}\n'
    whole = compress(text.encode() * 40)
    eighth = read_questions(written(tmp_path, whole, name))[7]
    assert eighth == Question("8", "[who?]" if ".tsv" in name else "who?", ("ann",))
    with pytest.raises(InputError, match=f"{name} cannot be decompressed"):
        read_questions(written(tmp_path, whole[: len(whole) // 2], name))


def test_a_small_file_that_decompresses_to_very_many_bytes_is_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(compressed, "_SMALL", 10_000)
    bomb = written(tmp_path, gzip.compress(b" " * 1_000_000), "q.jsonl.gz")
    with pytest.raises(InputError, match="decompress to over"):
        read_questions(bomb)


def test_an_array_of_webquestions_is_read_with_its_own_names(tmp_path: Path) -> None:
    rows = [{"qId": "wq1", "qText": "where?", "answers": ["Bahamas", "Nassau"]}]
    path = written(tmp_path, json.dumps(rows, indent=1), "val.json")
    assert read_questions(path) == [Question("wq1", "where?", ("Bahamas", "Nassau"))]


def squad(**changes: Any) -> dict[str, Any]:
    pairs = [
        {
            "id": "5a",
            "question": "who?",
            "answers": [{"text": "Ann", "answer_start": 0}, {"text": "Ann", "answer_start": 9}],
        },
        {"id": "5b", "question": "when?", "answers": [], "is_impossible": True},
    ]
    article = {"title": "Ann_of_Cleves", "paragraphs": [{"context": "Ann and Ann", "qas": pairs}]} | changes
    return {"version": "v2.0", "data": [article]}


def test_squads_nested_json_is_read_with_titles_and_without_what_has_no_answer(
    tmp_path: Path, capsys: Any
) -> None:
    file = written(tmp_path, json.dumps(squad(), indent=1), "dev.json")
    assert read_questions(file) == [Question("5a", "who?", ("Ann",), gold_titles=("Ann of Cleves",))]
    assert f"left out of {file}: 1 question without an answer" in capsys.readouterr().err
    with pytest.raises(InputError, match="it has no 'qas'"):
        read_questions(written(tmp_path, json.dumps(squad(paragraphs=[{}]))))


def test_answers_are_patterns_if_the_caller_passes_regex(tmp_path: Path) -> None:
    path = written(tmp_path, '{"question": "q", "answer": ["New ?York"]}')
    assert not read_questions(path)[0].regex
    [question] = read_questions(path, regex=True)
    assert question.regex and is_correct("in NewYork", question)
    listed = written(tmp_path, "q\t[ab]c", "q.tsv")
    assert read_questions(listed, regex=True)[0].answers == ("[ab]c",)


def curated_trec(*answers: str, **more: Any) -> str:
    """Lines in the format of DrQA."""
    rows = ({"question": f"who is {n}?", "answer": [answer], **more} for n, answer in enumerate(answers))
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_curated_trec_of_drqa_is_recognised_and_reported(tmp_path: Path, capsys: Any) -> None:
    path = written(tmp_path, curated_trec(r"New\s?York", "Ann", "Boris", "4.2"))
    questions = read_questions(path)
    assert [question.regex for question in questions] == [True] * 4
    assert is_correct("in NewYork", questions[0]) and is_correct("412", questions[3])
    (line,) = capsys.readouterr().err.splitlines()
    assert "CuratedTREC" in line and "--no-regex" in line and str(path) in line
    assert not any(question.regex for question in read_questions(path, regex=False))
    assert all(question.regex for question in read_questions(path, regex=True))
    assert capsys.readouterr().err == ""  # the caller said it


@pytest.mark.parametrize(
    "content",
    [
        curated_trec(r"New\s?York", "Ann", "Boris", "Carla", "Dora"),  # one of five
        curated_trec(r"New\s?York", hints=3),
        curated_trec(r"New\s?York") + '{"question": "q", "answer": ["a", "b"]}',
        curated_trec(r"(New|York", r"York|Ann"),  # no patterns
        '{"question": "q", "answers": ["a", "J\\\\.? King"]}',
        "q\tAnn|Boris",
    ],
)
def test_a_plain_answer_that_looks_like_a_pattern_causes_a_warning(
    tmp_path: Path, capsys: Any, content: str
) -> None:
    path = written(tmp_path, content, "q.txt")
    assert not any(question.regex for question in read_questions(path))
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{path}:" in line and "--regex or --no-regex" in line
    assert not any(question.regex for question in read_questions(path, regex=False))
    read_questions(path, need_answers=False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "content",
    [
        curated_trec("Mr. T", "U.S. 41 (Florida)", "AC/DC", "$5", "Who?", "C++", "a [sic] b", "1.5%"),
        '{"question": "q", "answers": ["(a|b)"], "regex": false}',
        '{"question": "q", "answers": ["(a|b)"], "regex": true}',
        "1\tfactoid\tq\t(a|b)",
    ],
)
def test_plain_answers_and_marked_patterns_cause_no_warning(
    tmp_path: Path, capsys: Any, content: str
) -> None:
    questions = read_questions(written(tmp_path, content, "q.txt"))
    assert [q.regex for q in questions] == ["true" in content or "factoid" in content] * len(questions)
    assert capsys.readouterr().err == ""


def test_a_cell_in_the_quotes_of_csv_is_read_without_them(tmp_path: Path) -> None:
    path = written(
        tmp_path, '"who sang ""Help""?"\t"""Weird Al"" Yankovic"\n"Help"\t"Ann" and "Bob"\n', "q.tsv"
    )
    assert [(q.question, q.answers) for q in read_questions(path)] == [
        ('who sang "Help"?', ('"Weird Al" Yankovic',)),
        ('"Help"', ('"Ann" and "Bob"',)),
    ]


def test_a_line_separator_inside_a_string_does_not_cut_the_line(tmp_path: Path) -> None:
    path = written(tmp_path, '{"question": "a\u2028b", "answers": ["c"]}\n')
    assert read_questions(path)[0].question == "a\u2028b"


def test_questions_without_answers_are_read_on_demand(tmp_path: Path) -> None:
    path = written(tmp_path, "who was first?\nwho was second?\n", "q.txt")
    assert [q.question for q in read_questions(path, need_answers=False)] == [
        "who was first?",
        "who was second?",
    ]
    with pytest.raises(InputError, match=r"q\.txt:1: the question .* has no answers"):
        read_questions(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no questions"),
        (b" \n\n", "holds no questions"),
        (b"[]", "holds no questions"),
        (b"\x00\x01", "binary or UTF-16"),
        ('{"question": "q"}'.encode("utf-16"), "binary or UTF-16"),
        (b'{"question": "q", "answers": ["a"]}\n{"question": "caf\xe9"}', r":2 is not UTF-8 \(byte 0xe9\)"),
        (
            b'{"question": "q", "answers": ["a"]}\n{"question": "q", "ans',
            r":2 is not valid JSON: Unterminated",
        ),
        (b'[{"question": "q",\n "answers": ["a"]},\n', r":3 is not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'["q"]', "entry 1: 'q' is no JSON object"),
        (b'{"text": "q"}', "1 has no question, only text"),
        (b"{}", "has no question, only an empty object"),
        (b'{"question": "  ", "answers": ["a"]}', "the question is empty"),
        (b'{"question": 3, "answers": ["a"]}', "question is 3, and must be a text"),
        (b'{"question": "q", "answers": []}', "the question 'q' has no answers"),
        (b'{"question": "q", "answers": [" "]}', "the question 'q' has no answers"),
        (b'{"question": "q"}', "the question 'q' has no answers"),
        (b'{"question": "q", "answers": [1972]}', "answer is 1972, and must be a text"),
        (b'{"question": "q", "answers": ["(a"], "regex": true}', "is not a regular expression"),
        (b'{"question": "q", "answers": ["a"], "regex": "yes"}', "regex is 'yes': write true or false"),
        (b'{"question": "\\ud800", "answers": ["a"]}', "has one half of a surrogate pair"),
        (
            b'{"id": "\\ud800", "question": "q", "answers": ["a"]}',
            ":1: id '.ud800' has one half of a surrogate pair",
        ),
        (
            b'[{"id": "\\udfff", "question": "q", "answers": ["a"]}]',
            "entry 1: id .* has one half of a surrogate pair",
        ),
        (
            b'{"question": "q", "answers": ["a", "\\udfff"]}',
            "answer '.udfff' has one half of a surrogate pair",
        ),
        (b'{"question": "q", "answers": ["\\ud800"], "regex": true}', "has one half of a surrogate pair"),
        (
            b'{"question": "q", "answers": ["a"], "gold_titles": ["\\ud800"]}',
            "title .* half of a surrogate pair",
        ),
        (b'{"\\ud800": "q", "answers": ["a"]}', "has no question, only"),
        (b'{"id": ["a"], "question": "q", "answers": ["a"]}', "id is ..a.., and must be a text"),
        (b'{"id": true, "question": "q", "answers": ["a"]}', "id is True, and must be a text"),
        (b'{"question": "q", "answers": ["a"], "answer": ["b"]}', "answers and answer mean the same"),
        (
            b'{"question": "q", "answers": ["a"], "gold_titles": {"T": 1}}',
            "gold title is .*, and must be a text",
        ),
        (b'{"question": "' + b"q" * 2001 + b'", "answers": ["a"]}', "question has 2001 characters"),
        (b'{"id": 1, "question": "q", "answers": ["a"]}\n' * 2, "id '1' is already used at"),
    ],
)
def test_bad_input_is_one_line_with_the_place(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as raised:
        read_questions(written(tmp_path, content))
    assert "\n" not in str(raised.value) and "q.jsonl" in str(raised.value)


@pytest.mark.parametrize(
    ("names", "document", "passage"),
    [
        ({}, "", ""),
        ({"passage_id": "p7"}, "p7", ""),  # a data set whose documents are passages
        ({"document_id": "d1"}, "d1", ""),
        ({"document_id": 17, "passage_id": None}, "17", ""),
        (
            {"document_id": "d1", "passage_id": "5219f2ed6a5ecc5a"},
            "d1",
            "5219f2ed6a5ecc5a",
        ),  # a made question
    ],
)
def test_document_and_passage_of_a_question_are_not_confused(
    tmp_path: Path, names: dict[str, Any], document: str, passage: str
) -> None:
    line = {"question": "q", "answers": ["a"], **names}
    (question,) = read_questions(written(tmp_path, json.dumps(line).encode()))
    assert (question.document_id, question.passage_id) == (document, passage)
    assert read_questions(written(tmp_path, json.dumps(question.to_json()).encode())) == [question]


def test_a_written_question_is_read_as_it_was(tmp_path: Path) -> None:
    question = Question("1", "who?", ("a|b", "c"), True, ("Ann of Cleves", "Town"), "d", "5219f2ed6a5ecc5a")
    assert read_questions(written(tmp_path, json.dumps(question.to_json()).encode())) == [question]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a\tb\tc", "3 columns"),
        ("a\t[b", "is not a list"),
        ("a\t[{[]}]", "is not a list"),
        ("a\t[1]", "answer is 1"),
    ],
)
def test_bad_tables_are_one_line_with_the_place(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(InputError, match=rf"q\.tsv:2: .*{message}"):
        read_questions(written(tmp_path, f"q\ta\n{line}\n", "q.tsv"))


def test_missing_files_and_folders_are_input_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no question file"):
        read_questions(tmp_path / "none.jsonl")
    with pytest.raises(InputError, match="is a folder"):
        read_questions(tmp_path)


@given(st.binary(max_size=200))
def test_any_bytes_give_questions_or_an_input_error(
    tmp_path_factory: pytest.TempPathFactory, content: Any
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "q"
    path.write_bytes(content)
    with contextlib.suppress(InputError):
        assert all(q.question and q.answers for q in read_questions(path))


def random_text(
    draw: random.Random, words: str = "a é \u2028 日 U.S. (b) C|D \\ud83d 'it' x\\d+ [1] ?"
) -> str:
    return " ".join(draw.choices(words.split(" "), k=draw.randint(1, 4))).strip() or "a"


def rendered(draw: random.Random, questions: list[Question]) -> tuple[str, str]:
    """The name and the text of a file that holds exactly these questions."""
    rows = [
        {draw.choice(["id", "qId"]): q.id, draw.choice(["question", "qText"]): q.question}
        | {draw.choice(["answers", "answer"]): list(q.answers), "regex": q.regex}
        for q in questions
    ]
    escaped = draw.random() < 0.5
    if draw.random() < 0.3:
        return "q.json", json.dumps(rows, indent=draw.choice([None, 1]), ensure_ascii=escaped)
    end = draw.choice(["\n", "\r\n", "\n\n"])
    return draw.choice(["q.jsonl", "q"]), "".join(json.dumps(r, ensure_ascii=escaped) + end for r in rows)


def damaged(draw: random.Random, content: bytes) -> bytes:
    """The bytes, with some of them removed, doubled or changed, or with odd bytes inserted."""
    strange = [
        b"\\ud800",
        b"\xff",
        b"\0",
        b"\t",
        b"\n",
        b"[" * 2000,
        b"1" * 5000,
        b"NaN",
        b"null",
        b'"',
        b"{",
        b"}",
        b"*(",
    ]
    strange += [
        b'"regex": true, ',
        b'"answers": 3, ',
        b'"id": {}, ',
        b"\xef\xbb\xbf",
        b"\xed\xa0\x80",
        b"(a{999999999999}",
    ]
    for _ in range(draw.randint(1, 3)):
        start = draw.randrange(len(content) + 1)
        end = min(len(content), start + draw.choice([0, 0, 1, 1, 20]))
        content = content[:start] + draw.choice([b"", content[start:end] * 2, *strange]) + content[end:]
    return content


@pytest.mark.slow
def test_many_question_files_are_read_right_or_refused_in_one_line(tmp_path: Path, trials: Trials) -> None:
    draw = random.Random(trials.seed)
    refused: list[str] = []
    count = trials.count(2000)
    for trial in range(count):
        regex = draw.random() < 0.3
        answers = "a é 日 x\\d+ (b|c) 4.2" if regex else "a é \u2028 U.S. (b) C|D 'it' [1]"
        meant = [
            Question(
                str(n), random_text(draw), tuple({random_text(draw, answers): 0 for _ in range(3)}), regex
            )
            for n in range(draw.randint(1, 5))
        ]
        name, text = rendered(draw, meant)
        content, whole = text.encode(), draw.random() < 0.3
        if draw.random() < 0.2 and not whole:
            content = b"\n".join(f"{q.question}\t{list(q.answers)}".encode() for q in meant)
        path = written(tmp_path, content if whole else damaged(draw, content), name)
        try:
            read = read_questions(
                path, regex=draw.choice([None, False]), need_answers=whole or draw.random() < 0.8
            )
        except InputError as error:
            refused.append(str(error))
            read = []
        if whole:
            assert read == meant, trial
        if not read:
            continue
        assert len({q.id for q in read}) == len(read)
        for question in read:
            "".join([question.id, question.question, *question.answers]).encode()
            is_correct("a", question), has_answer("a b", question)
    assert count // 10 < len(refused) < 7 * count // 10
    for line in refused:
        assert len(line.splitlines()) == 1 and len(line) < 500 and str(tmp_path) in line


@given(st.lists(st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), min_size=1), min_size=1))
def test_answers_survive_the_tab_separated_form_of_dpr(
    tmp_path_factory: pytest.TempPathFactory, answers: list[str]
) -> None:
    answers = [answer.strip() for answer in answers if answer.strip()]
    if not answers:
        return
    path = tmp_path_factory.mktemp("dpr") / "test.qa.csv"
    table = io.StringIO()
    csv.writer(table, delimiter="\t", lineterminator="\n").writerow(["who?", repr(answers)])
    path.write_text(table.getvalue(), encoding="utf-8")
    assert read_questions(path)[0].answers == tuple(dict.fromkeys(answers))
