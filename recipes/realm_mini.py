"""Makes the packaged encoder `package:realm-mini` from plain text, with the commands of `realm`.

    python recipes/realm_mini.py DATA OUT

DATA is a folder with `simplewiki/articles.jsonl.xz` and `enwiki_core/articles.jsonl.xz`: articles of two editions of Wikipedia,
JSON Lines {"id", "title", "text"}. Each command is printed before it runs. If the program was interrupted, repeat the call:
finished stages are skipped, and an interrupted stage continues. OUT/realm-mini is the encoder. The program takes about six
hours on one CPU core.
"""

import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from safetensors.torch import load_file

from realm.checksums import CHECKSUMS, record_checksums
from realm.files import read_json, write_json
from realm.model.manifest import HELD_OUT
from realm.model.tensor_files import save_tensors


def describe(encoder: str, name: str, sources: list[str], out: Path) -> None:
    """Copies an encoder, and adds the sources of its text to the description of the passages that its training held out.

    A later stage with text of other sources then need not hold out the same passages.
    """
    with changed_copy(out / encoder, out / name) as copy:
        write_json(copy / HELD_OUT, {**read_json(copy / HELD_OUT), "sources": sources})


def halve(encoder: str, name: str, out: Path) -> None:
    """Copies an encoder with its weights in 16 bits. `transformers` can read the copy, and computes in 32 bits."""
    with changed_copy(out / encoder, out / name) as copy:
        for file in copy.glob("*.safetensors"):
            halves = {key: value.half() for key, value in load_file(file).items()}
            save_tensors(halves, file, metadata={"format": "pt"})


@contextmanager
def changed_copy(encoder: Path, folder: Path) -> Iterator[Path]:
    """A copy of an encoder to be changed. Afterwards its checksums are recorded, and the complete copy becomes `folder`."""
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(encoder, part)
    yield part
    (part / CHECKSUMS).unlink(missing_ok=True)
    record_checksums(part)
    part.rename(folder)


PLAIN = "mlm --kb wikipedia --out {} --config realm-mini --set reading=0 --set copy_head=false --set learning_rate=1e-3"
STAGES: tuple[tuple[str, str | Callable[[Path], None]], ...] = (
    # The small corpus gives the wordpieces, and the masked sentences of the last training stage.
    (
        "kb",
        "kb build package:vital-articles package:factbook --out kb --vocab-size 12000 --config realm-mini",
    ),
    (
        "wikipedia",
        "kb build simplewiki.jsonl.xz enwiki_core.jsonl.xz --out wikipedia --tokenizer kb/tokenizer --tagger rules "
        "--set passage_tokens=144 --set held_out=0.02",
    ),
    # Two schedules, because the loss of the first was still falling at its end.
    ("first", f"{PLAIN.format('first')} --set steps=6000 --set warmup=400"),
    (
        "second",
        f"{PLAIN.format('second')} --init first/encoder --set steps=14000 --set warmup=300 --set seed=1",
    ),
    ("plain", partial(describe, "second/encoder", "plain", ["simplewiki.jsonl.xz", "enwiki_core.jsonl.xz"])),
    ("reading", "mlm --kb kb --init plain --out reading --config realm-mini"),
    (
        "described",
        partial(describe, "reading/encoder", "described", ["package:vital-articles", "package:factbook"]),
    ),
    ("realm-mini", partial(halve, "described", "realm-mini")),
)
"""For each stage, the folder that it makes, and its command or its function in this file."""


def main(data: Path, out: Path) -> None:
    """Runs the stages whose product is missing."""
    out.mkdir(parents=True, exist_ok=True)
    for name in ("simplewiki", "enwiki_core"):
        file = out / f"{name}.jsonl.xz"
        if not file.exists():
            file.symlink_to((data / name / "articles.jsonl.xz").resolve(strict=True))
    for product, stage in STAGES:
        if (out / product).exists():
            continue
        if isinstance(stage, str):
            print(f"$ realm {stage}", flush=True)
            subprocess.run([sys.executable, "-m", "realm", *shlex.split(stage)], cwd=out, check=True)
        else:
            stage(out)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python recipes/realm_mini.py DATA OUT")
    main(Path(sys.argv[1]), Path(sys.argv[2]))
