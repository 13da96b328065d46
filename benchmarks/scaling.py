"""Time, memory and disk of a knowledge base as it grows: build, index, first search, warm search, one document more.

    python benchmarks/scaling.py                                              # 2,000 and 10,000 passages
    python benchmarks/scaling.py --sizes 10000 100000 1000000 --folder big    # a million: an hour, see docs/scaling.md

Documents are made here: words as frequent as their ranks say, in sentences, paragraphs and articles of an encyclopedia's
lengths, so that passages of up to 288 wordpieces come out as full as real ones. Each stage is one of our commands in a
process of its own, seen from outside: seconds, CPU seconds of all its threads, largest memory (pages of mapped files
counted), bytes on disk. Sizes are built with the tagger `rules`; what a tagger of names costs is linear in words, and
measured on `--tagged` passages, by itself and in a build. The last table draws a straight line through the last two sizes
and reads it at 13.35 M and 1 G passages: arithmetic, not measurement, and only where both are 100,000 or more, for below
that buffers that fill up look like growth. Prints tables, and one JSON object as the last line.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import accumulate
from pathlib import Path

import shared

sys.path.insert(0, str(Path(__file__).parent.parent))  # run as a file: the repository is the package's home

WORDS_PER_PASSAGE = 202
"""About as many as fill a passage; what came out is in the table."""
FAR = (13_350_000, 1_000_000_000)
"""The paper's Wikipedia, and a thousand million."""
LEAST = 80_000
"""Passages from which on a straight line is drawn: 100,000 that were asked for, about."""
QUESTIONS = 64


def main() -> None:
    """Measures what the flags ask for and prints it."""
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(ONE[sys.argv[2]](*sys.argv[3:])))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[2_000, 10_000], help="passages, about")
    parser.add_argument("--tagged", type=int, default=1000, help="passages to tag; 0: none (default: 1000)")
    parser.add_argument(
        "--tagger", default="spacy:en_core_web_sm", help="what tags them (default: %(default)s)"
    )
    parser.add_argument("--processes", help="of the tagger of each size (default: one for each core)")
    parser.add_argument("--folder", type=Path, help="where to work, if not in a temporary folder; it stays")
    args = parser.parse_args()
    sizes, rows, tagging = sorted(args.sizes), [], []
    if args.folder is not None:
        args.folder.mkdir(parents=True, exist_ok=True)
    with nullcontext(args.folder) if args.folder else tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_model(folder)
        for size in sizes:
            for row in grown(folder, size, model, args.processes):
                rows.append(row)
                print(json.dumps(row), file=sys.stderr, flush=True)
        if args.tagged:
            tagging = tagged(folder, args.tagged, args.tagger)
    far = list(extrapolated(rows))
    for table in (rows, tagging, far):
        if table:
            shared.print_table(table)
            print()
    result = {"benchmark": "scaling", "rows": rows, "tagging": tagging, "extrapolated": far}
    print(json.dumps(result | shared.machine()))


def make_model(folder: Path) -> str:
    """An embedder of words, fitted to a small corpus of the same kind; its vectors have 128 numbers."""
    kb, model = folder / "small", folder / "model"
    if not model.exists():
        write_documents(folder / "small.jsonl", 1000)
        build(folder / "small.jsonl", kb, "--tagger", "rules", "--replace")
        shared.run(
            "mlm", "--kb", str(kb), "--init", "package:realm-mini", "--out", str(model), "--config", "demo"
        )
    return str(model)


def build(documents: Path, kb: Path, *flags: str) -> shared.Spent:
    """`realm kb build` with its defaults: passages of up to 288 wordpieces."""
    return shared.run("kb", "build", str(documents), "--out", str(kb), "--json", *flags)


def grown(folder: Path, size: int, model: str, processes: str | None) -> Iterator[shared.Row]:
    """A row for each stage of a knowledge base of about `size` passages, which goes at the end."""
    documents, kb = folder / f"{size}.jsonl", folder / f"kb{size}"
    if not documents.exists():
        write_documents(documents, size)
    both = "--kb", str(kb), "--model", model
    some = ("--processes", processes) if processes else ()
    built = build(documents, kb, "--tagger", "rules", "--replace", *some)
    passages = json.loads(built.output.splitlines()[-1])["passages"]

    def row(stage: str, spent: shared.Spent, disk: int | None = None) -> shared.Row:
        return {
            "passages": passages,
            "stage": stage,
            "s": round(spent.seconds, 4),
            "CPU s": round(spent.cpu_seconds, 4),
            "MB": round(spent.peak_mb),
            "disk MB": None if disk is None else round(disk / 2**20, 1),
        }

    yield row("documents", shared.Spent(0, 0, 0, ""), documents.stat().st_size)
    yield row("kb build", built, size_of(kb))
    before = size_of(kb)
    yield row("index", shared.run("index", *both), size_of(kb) - before)
    questions, hits = folder / "questions.jsonl", folder / "hits.jsonl"
    questions.write_text(json.dumps({"question": "What happened in 1848?"}) + "\n", encoding="utf-8")
    ask = "retrieve", *both, "--questions", str(questions), "--out", str(hits)
    yield row("first search", shared.run(*ask))
    shared.run(*ask, "--set", "mapped_index=true")  # writes the file that is mapped
    yield row("first search, mapped", shared.run(*ask, "--set", "mapped_index=true"))
    warm = shared.spent_by([sys.executable, __file__, "--one", "search", str(kb), model])
    for batch, seconds in json.loads(warm.output):
        yield row(f"search, {batch} at once", shared.Spent(seconds, seconds, warm.peak_mb, ""))
    more = folder / "more.jsonl"
    more.write_text(json.dumps({"title": "News", "text": "It came on 3 May 2026."}) + "\n", encoding="utf-8")
    yield row("kb add, a document", shared.run("kb", "add", str(more), "--kb", str(kb)))


def search(kb: str, model: str) -> list[tuple[int, float]]:
    """Questions asked at once, and the least seconds that a batch took, from text to passage numbers, as in a server."""
    from realm.environment import set_torch_environment

    set_torch_environment()
    from realm.qa.pipeline import AnswerConfig, Answerer

    answerer = Answerer.load(kb, model, AnswerConfig())
    answerer.version.index.prepare()
    questions = shared.questions_about(kb, QUESTIONS)
    found = []
    for batch in (QUESTIONS, 1):
        took = []
        for _ in range(10):
            began = time.perf_counter()
            answerer.retrieve(questions[:batch], 20, "dense")
            took.append(time.perf_counter() - began)
        found.append((batch, min(took)))
    return found


def tagged(folder: Path, size: int, tagger: str) -> list[shared.Row]:
    """What tagging takes by itself, and what `realm kb build` takes with it and without."""
    documents = folder / "tagged.jsonl"
    words, rows = write_documents(documents, size), []

    def row(what: str, processes: int, seconds: float, cpu_seconds: float) -> shared.Row:
        return {
            "what": what,
            "processes": processes,
            "s": round(seconds, 2),
            "CPU s": round(cpu_seconds, 2),
            "words/s": round(words / seconds),
        }

    for processes in (1, 2):
        one = [sys.executable, __file__, "--one", "tag", str(documents), tagger, str(processes)]
        alone = json.loads(shared.spent_by(one).output)
        rows.append(row(f"{tagger} alone", processes, *alone))
    for name, processes in (("rules", 1), (tagger, 2)):
        flags = "--tagger", name, "--processes", str(processes), "--replace"
        built = build(documents, folder / "tagged", *flags)
        rows.append(row(f"kb build, {name}", processes, built.seconds, built.cpu_seconds))
    return rows


def tag(documents: str, tagger: str, processes: str) -> tuple[float, float]:
    """Seconds and CPU seconds of a tagger on all documents, without those that it takes to load."""
    from realm.documents.readers import read_documents
    from realm.text.salient_spans import load_tagger

    loaded = load_tagger(tagger, int(processes))
    texts = [document.text for document in read_documents([documents], 1_000_000)]
    next(iter(loaded.annotate(texts[:1])))
    began, cpu = time.perf_counter(), cpu_seconds()
    for _ in loaded.annotate(texts):
        pass
    return time.perf_counter() - began, cpu_seconds() - cpu


ONE = {"search": search, "tag": tag}


def cpu_seconds() -> float:
    """Of this process and of its children that have ended."""
    import resource

    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def extrapolated(rows: Sequence[shared.Row]) -> Iterator[shared.Row]:
    """Each stage on the straight line through its last two sizes."""
    for stage in dict.fromkeys(row["stage"] for row in rows):
        own = [row for row in rows if row["stage"] == stage and row["passages"] > LEAST]
        if len(own) < 2:
            return
        first, last = own[-2:]
        for far in FAR:
            along = (far - last["passages"]) / (last["passages"] - first["passages"])
            values = {
                name: last[name] and max(0.0, last[name] + along * (last[name] - first[name]))
                for name in ("s", "CPU s", "MB", "disk MB")
            }
            yield {"passages": far, "stage": stage, **values}


def size_of(folder: Path) -> int:
    """Bytes of a folder's files."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def write_documents(path: Path, passages: int) -> int:
    """Articles of one to many paragraphs, enough for about so many passages -> their words."""
    draw, total = random.Random(0), 0
    vocabulary = english()
    weights = list(accumulate(1 / (rank + 10) for rank in range(len(vocabulary))))
    names = [word.capitalize() for word in vocabulary[2000:]]

    def sentence() -> str:
        words = draw.choices(vocabulary, cum_weights=weights, k=max(4, round(draw.gauss(19, 7))))
        if draw.random() < 0.6:
            words[draw.randrange(1, len(words))] = f"{draw.choice(names)} {draw.choice(names)}"
        if draw.random() < 0.4:
            words[-1] = f"in {draw.randint(1500, 2020)}"
        return f"{words[0].capitalize()} {' '.join(words[1:])}."

    with path.open("w", encoding="utf-8") as file:
        number = 0
        while total < passages * WORDS_PER_PASSAGE:
            wanted, paragraphs = draw.expovariate(1 / (2.2 * WORDS_PER_PASSAGE)) + 20, []
            while wanted > 0:
                paragraphs.append(" ".join(sentence() for _ in range(draw.randint(1, 8))))
                count = paragraphs[-1].count(" ") + 1
                wanted, total = wanted - count, total + count
            title = f"{draw.choice(names)} {draw.choice(names)} {number}"
            file.write(json.dumps({"title": title, "text": "\n\n".join(paragraphs)}) + "\n")
            number += 1
    return total


def english() -> list[str]:
    """Whole words of the packaged encoder's vocabulary, frequent ones first."""
    file = shared.HOME / "realm" / "assets" / "realm-mini" / "tokenizer.json"
    pieces = json.loads(file.read_text(encoding="utf-8"))["model"]["vocab"]
    return [
        piece
        for piece, _ in sorted(pieces.items(), key=lambda one: one[1])
        if piece.isalpha() and len(piece) > 1
    ]


if __name__ == "__main__":
    main()
