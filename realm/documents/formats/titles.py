"""Titles of documents: from the metadata of a file, or from its name."""

import re
from pathlib import Path

from realm.documents.formats.compressed import uncompressed
from realm.documents.formats.records import SURROGATE

_NO_TITLE = re.compile(
    r"microsoft (?:word|powerpoint|excel)\b.*|untitled.*|no title|title|(?:document|presentation|slide)\s*\d*"
    r"|.*\.(?:docx?|dvi|epub|fm|html?|indd|md|odt|pages|pdf|pptx?|ps|qx[dp]|rtf|tex|txt|xlsx?)",
    re.IGNORECASE,
)


def sensible_title(title: str | None) -> str:
    """The title in a file's metadata, or "" if this title is a file name or a placeholder.

    >>> sensible_title(" The Debian\\n FAQ "), sensible_title("Microsoft Word - report_final2.doc")
    ('The Debian FAQ', '')
    """
    words = " ".join(SURROGATE.sub("", title or "").split())
    named = any(map(str.isalpha, words)) and len(words) <= 300 and not _NO_TITLE.fullmatch(words)
    return words if named else ""


def without_title(title: str, text: str) -> str:
    """The text without its first line, if this line is the title.

    The title is stored beside the text, so the first passage would contain it twice.

    >>> without_title("Arden", "Arden\\n\\nA town."), without_title("Arden", "Arden is a town.")
    ('A town.', 'Arden is a town.')
    """
    first, _, rest = text.partition("\n")
    return rest.lstrip() if first.strip() == title else text


_NAMELESS = re.compile(r"index|readme", re.IGNORECASE)
"""Names of files that say nothing about their content."""


def file_title(path: Path) -> str:
    """The title of a file that has none: its name, or the name of its folder if the file is called README or index.

    >>> file_title(Path("docs/install.md.gz")), file_title(Path("chalk/README.md")), file_title(Path("README.md"))
    ('install', 'chalk', 'README')
    """
    name = uncompressed(path).stem
    return path.parent.name or name if _NAMELESS.fullmatch(name) else name
