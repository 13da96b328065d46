"""Titles in the metadata of files: placeholders of the programs that wrote the files are no titles."""

import unicodedata

import pytest

from realm.documents.formats.titles import sensible_title

PLACEHOLDERS = [
    "PowerPoint Presentation",
    "PowerPoint-Präsentation",
    "Présentation PowerPoint",
    "Presentación de PowerPoint",
    "Presentazione standard di PowerPoint",
    "Apresentação do PowerPoint",
    "Prezentacja programu PowerPoint",
    "PowerPoint 演示文稿",
    "Презентация PowerPoint",
    "Microsoft PowerPoint - talk [Read-Only]",
    "Microsoft Word - x.doc",
    "Microsoft Word Document",
    "Word Document",
    "New Microsoft Word Document (2)",
    "Document1",
    "Slide 1",
    "Folie 12",
    "(anonymous)",
    "Unknown",
    "Untitled-3",
    "Untitled Document",
    "No Title",
    "Ohne Titel",
    "Sans titre",
    "Sin título",
    "Senza titolo",
    "Без названия",
    "無題",
    "제목 없음",
    "report_final2.pdf",
    "2024-11-05",
    "\ud800",
    "",
]
TITLES = [
    "PowerPoint for teachers",
    "Word order in Dutch",
    "The Untitled Book",
    "Presentation of the accounts 2024",
    "New York",
    "Nova",
    "Document management",
    "Slide rules",
    "№ 7: Ἀνάβασις",
    "三国志",
]


@pytest.mark.parametrize("title", PLACEHOLDERS)
def test_a_placeholder_is_no_title(title: str) -> None:
    for form in ("NFC", "NFD"):  # macOS writes accents as characters of their own
        assert sensible_title(unicodedata.normalize(form, title)) == ""
    assert sensible_title(title.upper()) == ""


@pytest.mark.parametrize("title", TITLES)
def test_a_title_with_a_word_of_its_own_is_kept(title: str) -> None:
    assert sensible_title(f" {title}\n") == title
