"""Titles of documents: from the metadata of a file, or from its name."""

import re
import unicodedata
from pathlib import Path

from realm.documents.formats.compressed import uncompressed
from realm.documents.formats.records import SURROGATE
from realm.text.corpus import shorter_titles

_NO_TITLE = re.compile(
    r"microsoft (?:word|powerpoint|excel)\b.*|untitled.*"
    r"|.*\.(?:docx?|dvi|epub|fm|html?|indd|md|odt|pages|pdf|pptx?|ps|qx[dp]|rtf|tex|txt|xlsx?)",
    re.IGNORECASE,
)
_PLACEHOLDERS = frozenset(
    "title titel titre título titolo tytuł tytułu заголовка untitled unnamed unbenannt namnlös nimetön isimsiz"
    " naam navn namn name nom nombre nome nazwy názvu имени названия 無題 无标题 無標題 未命名 名称未設定 제목 무제"
    " anonymous unknown unspecified undefined null none"
    " presentation präsentation présentation presentación presentazione apresentação presentatie præsentation presentasjon"
    " prezentacja prezentace prezentácia prezentare prezentacija презентация презентація παρουσίαση esitys bemutató sunu sunusu"
    " プレゼンテーション 演示文稿 簡報 简报 프레젠테이션"
    " slide folie diapositive diapositiva dia slajd snímek lysbild слайд スライド 幻灯片 投影片 슬라이드"
    " document dokument documento dokumen asiakirja документ ドキュメント 文書 文档 文件 문서 belge"
    " workbook spreadsheet arbeitsmappe classeur".split()
)
"""Words of placeholders such as "Document 1" and "Sans titre", in the languages of office programs."""
_BESIDE_THEM = frozenset(
    "no not kein keine ohne sans sin senza sem zonder uten uden utan bez без 없음"
    " new neu neue neues nouveau nouvelle nuevo nueva nuovo nuova novo nova"
    " microsoft office word powerpoint excel libreoffice openoffice impress standard de di do du da programu aplikace".split()
)
"""Words that do not make a title of a placeholder, as in "PowerPoint Presentation"."""
_WORD = re.compile(r"[^\W\d_]+")


def sensible_title(title: str | None) -> str:
    """The title in a file's metadata, or "" if this title is a file name or a placeholder.

    >>> sensible_title(" The Debian\\n FAQ "), sensible_title("Microsoft Word - report_final2.doc")
    ('The Debian FAQ', '')
    >>> sensible_title("PowerPoint-Präsentation"), sensible_title("PowerPoint for teachers")
    ('', 'PowerPoint for teachers')
    """
    shown = " ".join(SURROGATE.sub("", title or "").split())
    if len(shown) > 300 or _NO_TITLE.fullmatch(shown):
        return ""
    words = set(_WORD.findall(unicodedata.normalize("NFC", shown).lower()))
    is_placeholder = not words.isdisjoint(_PLACEHOLDERS) and words <= _PLACEHOLDERS | _BESIDE_THEM
    return shown if words and not is_placeholder else ""


def without_title(title: str, text: str) -> str:
    """The text without its first line, if this line is the title, or the title without the name of a site.

    The title is stored beside the text, so the first passage would contain it twice.

    >>> without_title("Arden", "Arden\\n\\nA town."), without_title("Arden", "Arden is a town.")
    ('A town.', 'Arden is a town.')
    >>> without_title("Arden - Wikipedia", "Arden\\n\\nA town."), without_title("Arden (town)", "Arden\\n\\nA town.")
    ('A town.', 'Arden\\n\\nA town.')
    """
    first, _, rest = text.partition("\n")
    return rest.lstrip() if first.strip() in (title, *shorter_titles(title)) else text


_NAMELESS = re.compile(r"index|readme", re.IGNORECASE)
"""Names of files that say nothing about their content."""


def file_title(path: Path) -> str:
    """The title of a file that has none: its name, or the name of its folder if the file is called README or index.

    >>> file_title(Path("docs/install.md.gz")), file_title(Path("chalk/README.md")), file_title(Path("README.md"))
    ('install', 'chalk', 'README')
    """
    name = uncompressed(path).stem
    return path.parent.name or name if _NAMELESS.fullmatch(name) else name
