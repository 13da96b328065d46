"""reStructuredText (.rst), the format of much documentation, by way of HTML, which docutils makes.

Of the directives and roles of Sphinx, which docutils does not know, the text is kept, and the options are left out. No file is
included, and no other program is called.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from realm.documents.formats.encodings import decode, without_text
from realm.documents.formats.pages import read_page
from realm.documents.formats.records import Limits, Reason, Record, Unreadable, need
from realm.documents.formats.sections import page_record

_SETTINGS = {
    "_disable_config": True,  # docutils.conf in the current folder
    "docinfo_xform": False,
    "embed_stylesheet": False,
    "file_insertion_enabled": False,
    "halt_level": 5,
    "math_output": "latex",
    "raw_enabled": False,
    "report_level": 5,
    "stylesheet_path": None,
    "syntax_highlight": "none",
    "toc_backlinks": False,
}
_NO_TEXT = frozenset(
    "currentmodule graphviz highlight index literalinclude mermaid module plot tabularcolumns toctree uml".split()
)
"""Directives of Sphinx whose arguments and content are no text."""
_CONDITIONS = ("ifconfig", "only")
"""Directives of Sphinx whose content is text, and whose argument is a condition."""
_CODE = frozenset("code code-block console doctest ipython prompt sourcecode testcode testoutput".split())
"""Directives whose content is a block of code; docutils would refuse those with the options of Sphinx."""
_VERSIONS = {
    "versionadded": "Added in version",
    "versionchanged": "Changed in version",
    "deprecated": "Deprecated since version",
}
"""Directives of Sphinx -> the words with which their text begins."""


def read(path: Path, limits: Limits) -> Iterator[Record]:
    """One record. The title is the main heading, as in HTML, else the file name."""
    need("docutils", path)
    data = path.read_bytes()
    if len(data) > limits.file_bytes:
        raise Unreadable(path, Reason.TOO_LONG, f"{path}: over {limits.file_bytes:,} bytes: split it")
    if not data.strip():
        raise without_text(path, data[:5])
    decoded = decode(data, path)
    page = read_page(_html(decoded.text))
    headings = page.headings if limits.headings else ()
    yield page_record(path, page.main_heading, page.text, decoded.assumed, headings=headings)


def _html(text: str) -> str:
    from docutils import nodes
    from docutils.core import publish_doctree, publish_from_doctree

    settings = {**_SETTINGS, "line_length_limit": len(text) + 1}
    with _any_directive_and_role():
        tree = publish_doctree(text, settings_overrides=settings)
    first = next((one for one in tree if not isinstance(one, nodes.Titular)), None)
    if isinstance(first, nodes.field_list):  # settings of the page for Sphinx, such as ":orphan:"
        tree.remove(first)
    return str(publish_from_doctree(tree, writer="html5", settings_overrides=settings), "utf-8")


class _AnyOptions(dict[str, Any]):
    """Accepts every option of a directive."""

    def __bool__(self) -> bool:  # directives whose options are false have none
        return True

    def __missing__(self, name: str) -> Any:
        return str


@contextmanager
def _any_directive_and_role() -> Iterator[None]:
    """While the block runs, docutils accepts directives and roles that it does not know."""
    from docutils import nodes
    from docutils.parsers.rst import Directive, directives, roles

    class Unknown(Directive):
        optional_arguments, final_argument_whitespace, has_content = 1, True, True
        option_spec = _AnyOptions()

        def run(self) -> list[Any]:
            name = self.name.rpartition(":")[2]
            if name in _NO_TEXT or name.startswith("auto"):
                return []
            block = nodes.container()
            if name in _CODE:
                code = "\n".join(self.content)
                block += nodes.literal_block(code, code)
                return [block]
            if self.arguments and name not in _CONDITIONS:
                words = " ".join((*filter(None, [_VERSIONS.get(name)]), self.arguments[0]))
                inline, _ = self.state.inline_text(words, self.lineno)
                block += nodes.paragraph(words, "", *inline)
            self.state.nested_parse(self.content, self.content_offset, block)
            return [block]

    def text_of(name: str, rawtext: str, text: str, *_: Any, **__: Any) -> tuple[list[Any], list[Any]]:
        """The text of a role: in ":ref:`words <target>`" the words."""
        words, opened, _target = text.rpartition("<")
        shown = words.strip() if opened and words.strip() and text.endswith(">") else text
        return [nodes.inline(rawtext, shown.lstrip("~!"))], []

    directive, role = directives.directive, roles.role

    def any_directive(name: str, *given: Any) -> tuple[Any, list[Any]]:
        return (None if name in _CODE else directive(name, *given)[0]) or Unknown, []

    def any_role(*given: Any) -> tuple[Any, list[Any]]:
        return role(*given)[0] or text_of, []

    directives.directive, roles.role = any_directive, any_role
    try:
        yield
    finally:
        directives.directive, roles.role = directive, role
