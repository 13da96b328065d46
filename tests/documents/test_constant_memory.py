"""Files of any length are read in the same memory: each test reads a file, and then one with eight times as many documents."""

import json
import subprocess
import sys
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import pytest
from warcio.statusandheaders import StatusAndHeaders
from warcio.warcwriter import WARCWriter

from tests.documents.writers import page, write_dump

TEXT, FEW = "Arden is a town. " * 300, 250


def json_lines(path: Path, count: int) -> None:
    line = json.dumps({"text": TEXT})
    path.write_text("".join(f'{{"title": "Town {number}", {line[1:]}\n' for number in range(count)))


def dump(path: Path, count: int) -> None:
    write_dump(path, (page(f"Town {number}", TEXT) for number in range(count)))


def warc(path: Path, count: int) -> None:
    with path.open("wb") as file:
        writer = WARCWriter(file, gzip=False)
        headers = StatusAndHeaders("200 OK", [("Content-Type", "text/html")], protocol="HTTP/1.1")
        for number in range(count):
            address, body = f"http://a.b/{number}", BytesIO(f"<h1>Town {number}</h1><p>{TEXT}</p>".encode())
            writer.write_record(writer.create_warc_record(address, "response", body, http_headers=headers))


READ = """
import sys
from realm.documents.reading import read_documents
from tests.peak_memory import peak_kilobytes, peak_kilobytes_of_children
for path in sys.argv[1:]:
    print(sum(1 for _ in read_documents([path])), peak_kilobytes(), peak_kilobytes_of_children())
"""
"""Prints for each file the number of documents, and the largest memory of the process and of a child process so far."""


@pytest.mark.parametrize(("name", "write"), [("a.jsonl", json_lines), ("a.xml", dump), ("a.warc", warc)])
def test_eight_times_as_many_documents_need_the_same_memory(
    name: str, write: Callable[[Path, int], None], tmp_path: Path
) -> None:
    paths = [tmp_path / f"{count} {name}" for count in (FEW, 8 * FEW)]
    for path, count in zip(paths, (FEW, 8 * FEW), strict=True):
        write(path, count)
    ended = subprocess.run([sys.executable, "-c", READ, *paths], capture_output=True, text=True, check=True)
    first, second = (list(map(int, line.split())) for line in ended.stdout.splitlines())
    assert second[0] == 8 * first[0] == 8 * FEW
    assert second[1] - first[1] < 5_000  # the texts of the longer file have over 10,000 kilobytes
    assert second[2] - first[2] < 5_000
