"""Damaged files of every format: documents, or one line for what was left out; in bounded time and memory."""

import json
import random
import resource
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from realm.documents.reading import ReadingReport, read_documents
from realm.errors import InputError
from realm.text.corpus import Document
from tests.documents.writers import page, write_dump, write_multistream, write_warc, write_zim

WORDS = "The town of Köln lies on the Rhine — a “river” of Zürich, 3 € a day. It was built in 1180.".split()
SECONDS, MEGABYTES = 20, 1_500


def whole_files() -> dict[str, bytes]:
    """A sound file of each format and encoding, by name."""
    draw = random.Random(0)
    texts = [" ".join(draw.choices(WORDS, k=40)) for _ in range(8)]
    lines = "".join(
        json.dumps({"id": n, "title": f"T{n}", "text": t}, ensure_ascii=n % 2 == 0) + "\n"
        for n, t in enumerate(texts)
    )
    prose = "Title\n\n" + "\n\n".join(texts)
    blocks = "".join(f"<div><p class=x>{text}</div>" for text in texts)
    head = "<head><meta charset=utf-8><title>T</title><script>if(a<b)</script></head>"
    body = f"<nav><li>Home</nav><table><tr><td>1<td>2</table>{blocks}"
    html = f"<!doctype html><html>{head}<body>{body}</body></html>"
    markdown = (
        "---\ntitle: T\n---\n# Heading\n\n"
        + "\n\n> ".join(texts)
        + "\n\n- a\n- b\n\n| a | b |\n|---|---|\n| 1 | 2 |\n"
    )
    table = pa.table({"title": [f"T{n}" for n in range(8)], "text": texts, "id": list(range(8))})
    files = {
        "lines.jsonl": lines.encode(),
        "lines16.jsonl": lines.encode("utf-16"),
        "prose.txt": prose.encode(),
        "latin.txt": prose.encode("cp1252"),
        "prose16.txt": prose.encode("utf-16"),
        "page.html": html.encode(),
        "declared.html": html.replace("utf-8", "windows-1252").encode("cp1252"),
        "prose.md": markdown.encode(),
    }
    for compression in ("none", "zstd"):
        for dictionary in (False, True):
            sink = pa.BufferOutputStream()
            pq.write_table(table, sink, compression=compression, use_dictionary=dictionary, row_group_size=3)
            files[f"{compression}{dictionary}.parquet"] = sink.getvalue().to_pybytes()
    for compression in (None, "lz4"):
        for new in (pa.ipc.new_file, pa.ipc.new_stream):
            sink = pa.BufferOutputStream()
            options = pa.ipc.IpcWriteOptions(compression=compression)
            coded = table.set_column(1, "text", table["text"].dictionary_encode())
            with new(sink, coded.schema, options=options) as writer:
                writer.write_table(coded, max_chunksize=3)
            files[f"{compression}{new.__name__}.arrow"] = sink.getvalue().to_pybytes()
    pages = [page(f"T{n}", f"'''T{n}''' is in [[T{n + 1}]]. {text}") for n, text in enumerate(texts)]
    with TemporaryDirectory() as name:
        folder = Path(name)
        archives = [
            write_dump(folder / "pages.xml", pages),
            write_multistream(folder / "pages.xml.bz2", pages, per_stream=3),
            write_warc(folder / "crawl.warc", 3),
            write_warc(folder / "crawl.warc.gz", 3),
            write_zim(folder / "wiki.zim"),
        ]
        files |= {path.name: path.read_bytes() for path in archives}
    files["wiki_00"] = "".join(
        f'<doc id="{n}" url="u" title="T{n}">\nT{n}\n\n{text}\n</doc>\n' for n, text in enumerate(texts)
    ).encode()
    return files


def damaged(content: bytes, other: bytes, draw: random.Random) -> bytes:
    """The file with one to four changes: bytes, pieces lost, doubled, repeated, moved in from another file, or cut off."""
    for _ in range(draw.randint(1, 4)):
        start = draw.randrange(len(content) + 1)
        end = min(len(content), start + draw.choice((1, 4, 30, 300)))
        piece = content[start:end]
        match draw.randrange(7):
            case 0:
                piece = draw.randbytes(len(piece))
            case 1:
                piece = b""
            case 2:
                piece *= draw.choice((2, 300))
            case 3:
                at = draw.randrange(len(other))
                piece = other[at : at + 100]
            case 4:
                piece = draw.choice(
                    (b"<a ", b"<![", b"[", b"<div>", b"<!--", b"\0", b"\xff", b"{", b'"', b"\\ud800", b"`")
                ) * draw.choice((1, 5_000))
            case 5:
                piece = bytes(byte ^ (1 << draw.randrange(8)) for byte in piece[:1]) + piece[1:]
            case 6:
                return content[:start]
        content = content[:start] + piece + content[end:]
    return content


def check(path: Path, content: bytes) -> None:
    """Reads a damaged file; raises where anything but documents or lines in the report comes of it."""
    path.write_bytes(content)
    report = ReadingReport()
    documents: list[Document] = []
    with suppress(InputError):  # nothing could be read
        documents += read_documents([str(path)], report=report)
    for document in documents:
        "".join(document[:3]).encode()
    texts = [document.text for document in documents]
    assert texts or report.left_out
    assert all(path.name in one.problem and one.problem.isprintable() for one in report.left_out)
    if path.name == "lines.jsonl":  # whatever another reader of JSON Lines makes of it
        for line in content.split(b"\n"):
            try:
                fields = json.loads(line.decode("utf-8-sig"))
                text = fields["text"] if isinstance(fields["title"], str) else None
                if isinstance(text, str) and b"\\ud" not in line and b"\0" not in content[:1024]:
                    assert text in texts or any(one.reason.startswith("with") for one in report.left_out)
            except (ValueError, TypeError, KeyError, RecursionError):
                continue
    if path.name == "prose.txt" and texts and not report.assumed:
        words = content.decode("utf-8-sig").split()
        assert documents[0].text.split() == words or " ".join(documents[0][:2]).split()[-50:] == words[-50:]


def main(folder: str, count: int, seed: int) -> None:
    """Reads so many damaged files; prints the slowest one's seconds and the megabytes that all took."""
    draw = random.Random(seed)
    files = whole_files()
    for name, content in files.items():
        check(Path(folder, name), content)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    slowest = 0.0
    for number in range(count):
        name = draw.choice(list(files))
        content = damaged(files[name], files[draw.choice(list(files))], draw)
        begin = time.process_time()
        try:
            check(Path(folder, name), content)
        except BaseException:
            print(f"file {number} of seed {seed}: {folder}/{name}", file=sys.stderr)
            raise
        slowest = max(slowest, time.process_time() - begin)
    print(slowest, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)


def run(folder: Path, count: int, seed: int) -> None:
    """`main` in a process of its own, which a library may crash."""
    script = f"""
from tests.documents.shared_child import shared_child
from tests.documents.test_damaged_files import main
with shared_child():
    main({str(folder)!r}, {count}, {seed})
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3_000:]
    seconds, megabytes = map(
        float, done.stdout.splitlines()[-1].split()
    )  # libzim prints how far it has written
    assert seconds < SECONDS and megabytes < MEGABYTES


def test_damaged_files_are_documents_or_left_out(tmp_path: Path) -> None:
    run(tmp_path, 50, 0)


@pytest.mark.slow
def test_many_damaged_files_are_documents_or_left_out(tmp_path: Path, trials) -> None:
    run(tmp_path, trials.count(2000), trials.seed)
