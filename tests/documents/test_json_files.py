"""JSON files: an object, a list, an object per line, and files of programs."""

import gzip
import json
from pathlib import Path

import pytest

from realm.documents.reading import ReadingReport, read_documents
from realm.errors import InputError
from realm.text.corpus import Document
from realm.text.fields import FieldNames
from tests.documents.test_reading import lines, read, write


@pytest.mark.parametrize("ending", [".json", ".json.gz"])
def test_a_json_file_has_an_object_a_list_of_objects_or_an_object_per_line(
    tmp_path: Path, ending: str
) -> None:
    one, two = {"id": 7, "title": "A", "text": "One."}, {"title": "Ö", "maintext": "Two.", "url": "x"}
    documents = [Document("A", "One.", "7"), Document("Ö", "Two.", "Ö", None, {"url": "x"})]
    contents = {
        lines(one, two): documents,
        "\n" + lines(two): documents[1:],
        json.dumps(one): documents[:1],
        json.dumps(two, indent=2, ensure_ascii=False): documents[1:],
        json.dumps([one, two]): documents,
        "\ufeff" + json.dumps([one, two], indent=1): documents,
        f"[\n{json.dumps(one)}\n]": documents[:1],
        f"[\n{json.dumps(one)}\n,{json.dumps(two)}\n]": documents,
        b"\xff\xfe" + lines(one, two).encode("utf-16-le"): documents,
        json.dumps(two, ensure_ascii=False).encode("cp1252") + b"\n" + lines(one).encode(): documents[::-1],
    }
    for number, (content, expected) in enumerate(contents.items()):
        data = content.encode() if isinstance(content, str) else content
        file = write(tmp_path / f"{number}{ending}", gzip.compress(data) if ending.endswith("gz") else data)
        assert read(file) == expected


def test_json_without_texts_is_a_file_of_another_type(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    schema = {"title": "Town", "type": "object"}
    others = ({"name": "realm"}, [1, 2, 3], {}, [], "text", None, [{"a": 1}, {"b": 2}], schema)
    contents = [*map(json.dumps, others), lines({"event": 1}, {"event": 2})]
    for number, content in enumerate(contents):
        write(tmp_path / f"{number}.json", content)
    with pytest.raises(InputError, match='no object in this JSON has a text under the key "text": name'):
        read(tmp_path / "0.json")
    with pytest.raises(InputError, match=r'has a text under the key "body"$'):
        list(read_documents([str(tmp_path / "0.json")], names=FieldNames(text="body")))
    write(tmp_path / "a.txt", "A town.")
    assert len(read(tmp_path)) == 1  # the other files are no problem
    reason = "JSON files without a text (the setting text_field names its key)"
    assert f"left out: {len(contents)} {reason}: {tmp_path}/0.json" in caplog.text
    report = ReadingReport()
    list(read_documents([str(tmp_path)], report=report))
    assert report.reasons == {reason: len(contents)}


def test_json_lines_after_a_damaged_line_are_read(tmp_path: Path) -> None:
    good = {"title": "A", "text": "One."}
    others = '{"title": "B"}', "[1]", '{"a": 1}\n{"title": 1, "text": "a"}'
    for first, reason in (
        ('{"title": "B", "te', "not JSON"),
        *((one, "without a usable title, text or id") for one in others),
    ):
        report = ReadingReport()
        file = write(tmp_path / "a.json", f"{first}\n{lines(good)}")
        assert [one.title for one in read_documents([str(file)], report=report)] == ["A"]
        assert report.reasons == {reason: 1 + first.count("\n")}


def test_a_problem_in_a_json_file_has_its_place(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    good = {"title": "A", "text": "One."}
    for content, problem in {
        json.dumps([good, {"title": "B"}]): r"a\.json: value 2: no \"text\" \(fields: 'title'\)",
        json.dumps([good, 5]): r"a\.json: value 2: the value is 5, and must be an object",
        lines(good) + "[": r"a\.json:2: not JSON",
        json.dumps([good], indent=1)[:-2]: r"a\.json: not JSON \(Expecting ',' delimiter\)",
        "[" * 100_000: r"a\.json: not JSON",
        " ": r"a\.json contains only white space",
    }.items():
        write(file, content)
        with pytest.raises(InputError, match=problem):
            read(file)
