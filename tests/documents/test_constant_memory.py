"""Files of any length are read in the same memory: each test reads a file, and then one with more documents."""

import json
import subprocess
import sys
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from warcio.statusandheaders import StatusAndHeaders
from warcio.warcwriter import WARCWriter

from tests.documents.writers import page, write_articles_as_zim, write_multistream

TEXT, FEW = "Arden is a town. " * 300, 250


def json_lines(path: Path, count: int) -> None:
    line = json.dumps({"text": TEXT})
    path.write_text("".join(f'{{"title": "Town {number}", {line[1:]}\n' for number in range(count)))


def warc(path: Path, count: int) -> None:
    with path.open("wb") as file:
        writer = WARCWriter(file, gzip=False)
        headers = StatusAndHeaders("200 OK", [("Content-Type", "text/html")], protocol="HTTP/1.1")
        for number in range(count):
            address, body = f"http://a.b/{number}", BytesIO(f"<h1>Town {number}</h1><p>{TEXT}</p>".encode())
            writer.write_record(writer.create_warc_record(address, "response", body, http_headers=headers))


def multistream(path: Path, count: int) -> None:
    write_multistream(path, (page(f"Town {number}", TEXT) for number in range(count)), per_stream=100)


def rows(path: Path, count: int) -> None:
    with path.open("w") as file:
        file.write("id\ttitle\ttext\n")
        file.writelines(f"{number}\tTown {number}\t{TEXT}\n" for number in range(count))


def parquet(path: Path, count: int) -> None:
    columns = {"title": [f"Town {number}" for number in range(count)], "text": [TEXT] * count}
    pq.write_table(pa.table(columns), path, row_group_size=100)


def wikiextractor(path: Path, count: int) -> None:
    body = f'url="" title="Town {{0}}">\nTown {{0}}\n\n{TEXT}\n</doc>\n'
    path.write_text("".join(f'<doc id="{number}" ' + body.format(number) for number in range(count)))


def zim(path: Path, count: int) -> None:
    write_articles_as_zim(path, ((f"Town {number}", TEXT) for number in range(count)))


READ = """
import sys
from realm.documents.reading import read_documents
from tests.peak_memory import peak_kilobytes, peak_kilobytes_of_children
for path in sys.argv[1:]:
    print(sum(1 for _ in read_documents([path])), peak_kilobytes(), peak_kilobytes_of_children())
"""
"""Prints for each file the number of documents, and the largest memory of the process and of a child process so far."""


WRITERS = {
    "a.jsonl": json_lines,
    "a.xml.bz2": multistream,
    "a.warc": warc,
    "a.tsv": rows,
    "a.parquet": parquet,
    "wiki_00": wikiextractor,
}


@pytest.mark.parametrize("name", WRITERS)
def test_eight_times_as_many_documents_need_the_same_memory(name: str, tmp_path: Path) -> None:
    check(name, WRITERS[name], (FEW, 8 * FEW), tmp_path)


@pytest.mark.slow
def test_twice_as_many_pages_of_a_zim_archive_need_the_same_memory(tmp_path: Path) -> None:
    check("a.zim", zim, (80 * FEW, 160 * FEW), tmp_path)  # libzim keeps 16 MB of decompressed pages


def check(name: str, write: Callable[[Path, int], None], counts: tuple[int, int], folder: Path) -> None:
    paths = []
    for count in counts:
        (folder / str(count)).mkdir()
        paths.append(folder / str(count) / name)
        write(paths[-1], count)
    ended = subprocess.run([sys.executable, "-c", READ, *paths], capture_output=True, text=True, check=True)
    first, second = (list(map(int, line.split())) for line in ended.stdout.splitlines())
    assert (first[0], second[0]) == counts
    assert second[1] - first[1] < 5_000  # the texts of the longer file have over 10,000 kilobytes
    assert second[2] - first[2] < 5_000
