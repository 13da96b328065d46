"""reStructuredText with the directives and roles of Sphinx; what it includes from elsewhere is left out."""

from pathlib import Path

import pytest

from realm.documents.formats import rst
from realm.documents.formats.records import Limits, Record, Unreadable
from realm.documents.reading import read_documents

PAGE = """:orphan:

.. _installing:

==================
Installing Kestrel
==================

The gateway needs **Debian 12**, see :ref:`the list <hardware>` and :py:func:`~kestrel.run`.

.. toctree::
   :maxdepth: 2

   first

.. versionadded:: 2.1
   The ``--fast`` option.

.. py:function:: kestrel.run(port)
   :module: kestrel

   Runs the gateway.

.. only:: html and not latex

   Seen on screens.

.. comment

Ports
=====

.. list-table::
   :header-rows: 1

   * - Port
     - Service
   * - 9555
     - admin

.. code-block:: python
   :linenos:

   kestrel.run(9555)

A link_ and `another <https://x.y>`_ and |sub| and :unknown:`role`.

.. _link: https://example.org
.. |sub| replace:: replaced
.. automodule:: kestrel
   :members:
"""
TEXT = """The gateway needs Debian 12, see the list and kestrel.run.

Added in version 2.1 The --fast option.

kestrel.run(port)

Runs the gateway.

Seen on screens.

Ports

Port: 9555; Service: admin.

kestrel.run(9555)

A link and another and replaced and role."""


def read(path: Path, text: str, **limits: bool) -> Record:
    path.write_text(text)
    (record,) = rst.read(path, Limits(**limits))
    return record


def test_page_of_sphinx_is_read_with_the_text_of_its_directives_and_roles(tmp_path: Path) -> None:
    record = read(tmp_path / "a.rst", PAGE, headings=True)
    assert (record.title, record.text) == ("Installing Kestrel", TEXT)
    assert [section.title for section in record.sections] == [
        "Installing Kestrel",
        "Installing Kestrel > Ports",
    ]
    (document,) = read_documents([str(tmp_path)])  # in the child process
    assert document.text == TEXT


def test_no_other_file_is_read_and_no_markup_of_others_is_kept(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("The password is swordfish.")
    (tmp_path / "rows.csv").write_text("a,swordfish\n")
    (tmp_path / "docutils.conf").write_text("[general]\nfile_insertion_enabled: yes\nraw_enabled: yes\n")
    text = (
        "Before.\n\n.. include:: secret.txt\n\n.. literalinclude:: secret.txt\n\n.. csv-table::\n   :file: rows.csv\n\n"
        ".. raw:: html\n   :file: secret.txt\n\n.. raw:: html\n\n   <b>swordfish</b>\n\nAfter.\n"
    )
    record = read(tmp_path / "a.rst", text)
    assert record.text == "Before.\n\nAfter."


def test_errors_of_the_markup_cost_no_text_around_them(tmp_path: Path) -> None:
    record = read(
        tmp_path / "a.rst",
        "Town hall\n=====\n\nArden *lies on `the` Ouse.\n\n.. note::\n\nHalden_ had |a| mint.\n",
    )
    assert record.title == "Town hall"
    assert "lies on" in record.text and "mint" in record.text


def test_empty_page_and_page_of_markup_alone_are_left_out(tmp_path: Path) -> None:
    with pytest.raises(Unreadable, match="only white space"):
        read(tmp_path / "a.rst", " \n")
    with pytest.raises(Unreadable, match="has no text"):
        read(tmp_path / "b.rst", ".. toctree::\n\n   a\n")
