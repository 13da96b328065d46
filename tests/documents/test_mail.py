"""E-mails, as Python's own `email` writes them, and as other programs do."""

import mailbox
from contextlib import closing, suppress
from datetime import UTC, datetime
from email.message import EmailMessage
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realm.documents.formats import mail
from realm.documents.formats.records import Limits, Pages, Record, Unreadable
from realm.documents.reading import ReadingReport, read_documents
from realm.errors import InputError
from realm.text.corpus import Document

pytestmark = pytest.mark.usefixtures("one_child")


def read(path: Path) -> Document:
    (found,) = read_documents([str(path)])
    return found


def message(**headers: str) -> EmailMessage:
    found = EmailMessage()
    for name, value in headers.items():
        found[name] = value
    return found


def test_a_message_has_its_subject_text_and_headers(tmp_path: Path) -> None:
    sent = message(
        Subject="Garantie für die Pumpe – Müller",
        From="Ana Müller <ana@example.org>",
        To="help@example.org",
        Date="Tue, 03 Mar 2026 09:30:00 +0100",
    )
    sent.set_content("The warranty of pump 7 ends in 2029.\n\nGrüße\nAna\n")
    sent.add_alternative("<p>The warranty <b>ends</b>.</p>", subtype="html")
    sent.add_attachment(b"%PDF-", maintype="application", subtype="pdf", filename="offer.pdf")
    (tmp_path / "a.eml").write_bytes(bytes(sent))
    found = read(tmp_path / "a.eml")
    assert (found.title, found.text) == (
        "Garantie für die Pumpe – Müller",
        "The warranty of pump 7 ends in 2029.\n\nGrüße\nAna",
    )
    assert {name: found.fields[name] for name in ("from", "to", "date")} == {
        "from": "Ana Müller <ana@example.org>",
        "to": "help@example.org",
        "date": datetime(2026, 3, 3, 8, 30, tzinfo=UTC).isoformat().replace("+00:00", "Z"),
    }
    assert "cc" not in found.fields and found.id == str(tmp_path / "a.eml")


def test_a_message_with_html_alone_has_the_text_of_the_page(tmp_path: Path) -> None:
    sent = message()
    sent.set_content("<h1>News</h1><p>One.</p><script>no</script><p>Two.</p>", subtype="html")
    (tmp_path / "note.eml").write_bytes(bytes(sent))
    found = read(tmp_path / "note.eml")
    assert (found.title, found.text) == ("note", "News\n\nOne.\n\nTwo.")


@pytest.mark.parametrize("charset", ["", "; charset=utf-8", "; charset=klingon"])
def test_a_charset_that_is_missing_wrong_or_unknown_is_guessed(charset: str, tmp_path: Path) -> None:
    head = f"Subject: Caf\xe9 =?utf-8?q?caf=C3=A9?=\nDate: soon\nContent-Type: text/plain{charset}\n\n"
    (tmp_path / "a.eml").write_bytes(
        head.encode("cp1252") + "Wir öffnen um neun Uhr, jeden Tag.".encode("cp1252")
    )
    found = read(tmp_path / "a.eml")
    assert found.text == "Wir öffnen um neun Uhr, jeden Tag." and found.title.endswith("café")


def test_a_message_without_text_is_left_out(tmp_path: Path) -> None:
    sent = message(Subject="a picture")
    sent.add_attachment(b"...", maintype="image", subtype="png", filename="a.png")
    for name, content in (("a", bytes(sent)), ("b", b""), ("c", b"Subject: only\n\n")):
        (tmp_path / f"{name}.eml").write_bytes(content)
    report = ReadingReport()
    with pytest.raises(InputError, match="nothing could be read"):
        list(read_documents([str(tmp_path)], report=report))
    assert dict(report.reasons) == {"without text": 2, "empty": 1}


def test_alternatives_and_forwarded_messages(tmp_path: Path) -> None:
    inner = message(Subject="the offer")
    inner.set_content("Pump 7 costs 900 euros.")
    sent = message(Subject="Fwd: the offer")
    sent.set_content(" \n")
    sent.add_alternative("<p>See <b>below</b>.</p>", subtype="html")
    sent.add_attachment(inner)
    sent.add_attachment(b"secret", maintype="text", subtype="plain", filename="notes.txt")
    (tmp_path / "a.eml").write_bytes(bytes(sent))
    assert read(tmp_path / "a.eml").text == "See below.\n\nPump 7 costs 900 euros."


@pytest.mark.parametrize(
    "to", ['"', '"A, B" <', "a@", "<@", "a@[", "(" * 3000, "=?utf-7?b?AAAA?=", "=?x?q?=FF?="]
)
def test_headers_that_are_not_valid_do_not_hide_the_text(to: str, tmp_path: Path) -> None:
    head = f"Subject: {to}\nTo: {to}\nCc: {to}\nDate: {to}\n\nThe text."
    (tmp_path / "a.eml").write_text(head)
    assert read(tmp_path / "a.eml").text == "The text."


@pytest.mark.parametrize(
    "charset", ["utf-7", "unicode_escape", "undefined", "punycode", "idna", "a\0b", "rot13"]
)
def test_a_charset_that_is_none_of_text_is_not_used(charset: str, tmp_path: Path) -> None:
    (tmp_path / "a.eml").write_text(f"Content-Type: text/plain; charset={charset}\n\nhello +2AA- \\ud800 x")
    assert read(tmp_path / "a.eml").text == "hello +2AA- \\ud800 x"


def test_headers_of_a_megabyte_cost_only_this_mail(tmp_path: Path) -> None:
    (tmp_path / "a.eml").write_text("Content-Type: text/plain; " + "a=bbbbbbb;" * 100_000 + "\n\nText.")
    (tmp_path / "b.eml").write_text("Subject: " + "=?utf-8?q?a?= " * 70_000 + "\n\nText.")
    (tmp_path / "c.txt").write_text("A note.")
    found = list(read_documents([str(tmp_path)], report=ReadingReport()))
    assert found[-1].text == "A note." and {len(one.title) < 10_001 for one in found} == {True}


@given(
    st.binary(max_size=200),
    st.sampled_from([b"", b"Content-Type: multipart/mixed; boundary=x\n\n--x\n", b"Subject: "]),
)
def test_any_bytes_are_a_message_or_one_problem(tmp_path_factory, data: bytes, start: bytes) -> None:
    path = tmp_path_factory.mktemp("mail") / "a.eml"
    path.write_bytes(start + data)
    with suppress(Unreadable):
        (found,) = mail.read(path, Limits())
        assert found.text and found.title and (found.title + found.text).encode()


# --- mailboxes -----------------------------------------------------------------------------------


def mailbox_of(path: Path, *numbers: int) -> Path:
    """A mailbox, written by Python, with these messages; those with an odd number have no Message-ID."""
    with closing(mailbox.mbox(path)) as box:
        for number in numbers:
            sent = message(Subject=f"Pump {number}", From="Ana <ana@example.org>")
            if number % 2 == 0:
                sent["Message-ID"] = f"<{number}@example.org>"
            sent.set_content(f"It costs {number} euros.\n\nFrom now on 3 per day.\n")
            box.add(sent)
    return path


def test_each_message_of_a_mailbox_is_a_document(tmp_path: Path) -> None:
    box = mailbox_of(tmp_path / "list.mbox", 1, 2, 3, 4)
    before = list(read_documents([str(box)]))
    assert [(one.title, one.text) for one in before] == [
        (f"Pump {number}", f"It costs {number} euros.\n\nFrom now on 3 per day.") for number in (1, 2, 3, 4)
    ]
    assert before[1].id == f"{box}:<2@example.org>"
    assert dict(before[1].fields) == {"path": str(box), "from": "Ana <ana@example.org>"}
    box.unlink()
    after = list(read_documents([str(mailbox_of(box, 2, 3, 4, 5))]))
    assert [one.id for one in after[:3]] == [one.id for one in before[1:]]


def test_a_message_of_a_mailbox_that_cannot_be_read_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parts(path: Path) -> list[str]:
        return [str(one) for one in mail.read(path, Limits()) if not isinstance(one, Pages | Record)]

    box = mailbox_of(tmp_path / "list.mbox", 2)
    nested = "".join(f"Content-Type: multipart/mixed; boundary={n}\n\n--{n}\n" for n in range(3_000))
    head = "From - Mon Jan 01 10:00:00 2024\n"
    whole = box.read_text()
    box.write_text(head + nested + "\n" + head + "Subject: a\n\n" + "long line\n" * 50_000 + "\n" + whole)
    monkeypatch.setattr(Limits, "file_bytes", 400_000)
    found = list(mail.read(box, Limits()))
    assert [one.title for one in found if isinstance(one, Record)] == ["Pump 2"]
    reasons = [one.reason for one in found if isinstance(one, Unreadable)]
    assert reasons == ["damaged", "too long"] and "parts" in parts(box)[0]


@pytest.mark.parametrize("content", ["Subject: A\n\nText.", "\nFrom now on 10:00 2024\n"])
def test_a_file_that_is_no_mailbox_is_one_line(content: str, tmp_path: Path) -> None:
    (tmp_path / "a.mbox").write_text(content)
    with pytest.raises(InputError, match=r'a\.mbox: a mailbox must begin with a line "From \.\.\."'):
        read(tmp_path / "a.mbox")


_LINE = "From - Mon Jan 01 10:00:00 2024\n"
"""A line above a message, as Thunderbird writes it."""


def test_a_line_of_a_text_that_begins_with_from_is_text(tmp_path: Path) -> None:
    text = "From 09:00 on 12 May 2024 we meet.\n\nFrom 09:00 on 13 May 2024 too.\n" + _LINE + "The end."
    box = tmp_path / "a.mbox"
    box.write_text(f"{_LINE}Subject: A\n\n{text}\n\n{_LINE}Subject: B\n\nMore.\n")
    assert [(one.title, one.text) for one in read_documents([str(box)])] == [("A", text), ("B", "More.")]


@pytest.mark.parametrize(
    "line",
    [
        "From ana@example.org Tue Mar  3 09:30:00 2026",
        "From MAILER-DAEMON Tue Mar  3 09:30:00 2026",
        "From 17@xxx Tue Mar 03 09:30:00 +0000 2026",
        "From ana at example.org  Tue Mar  3 09:30:00 2026",
        f"From {'a' * 250}@example.org Tue Mar  3 09:30:00 2026",
    ],
)
@pytest.mark.parametrize("start", [b"", b"\n", b"\r\n\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n"])
def test_lines_above_messages_of_several_programs(start: bytes, line: str, tmp_path: Path) -> None:
    box = tmp_path / "a.mbox"
    box.write_bytes(start + "\n".join(f"{line}\nSubject: {n}\n\nText {n}.\n" for n in (1, 2)).encode())
    found = [one for one in mail.read(box, Limits()) if not isinstance(one, Pages)]
    assert [one.text for one in found if isinstance(one, Record)] == ["Text 1.", "Text 2."]
    assert len(found) == 2


def test_messages_with_the_same_message_id_are_all_read_and_equal_ones_once(tmp_path: Path) -> None:
    box = tmp_path / "a.mbox"
    heads = ["Message-ID: <1@a>\n", "Message-ID: <1@a>\n", "", "Message-ID: <1@a>\n", ""]
    texts = ["One.", "Two.", "Three.", "Two.", "Three."]
    box.write_text("\n".join(f"{_LINE}{head}\n{text}\n" for head, text in zip(heads, texts, strict=True)))
    found = list(read_documents([str(box)]))  # no problem is allowed
    assert [one.text for one in found] == texts[:3]
    assert found[0].id == f"{box}:<1@a>" and found[1].id.startswith(f"{box}:<1@a> ")


@given(st.lists(st.sampled_from([_LINE.encode(), b">From a\n", b"Subject: a\n", b"\n", b"\xff"])))
def test_any_lines_are_messages_or_problems(tmp_path_factory, lines: list[bytes]) -> None:
    path = tmp_path_factory.mktemp("mail") / "a.mbox"
    path.write_bytes(_LINE.encode() + b"".join(lines))
    found = [one for one in mail.read(path, Limits()) if not isinstance(one, Pages)]
    assert len(found) == 1 + path.read_bytes().count(b"\n\n" + _LINE.encode().rstrip())
