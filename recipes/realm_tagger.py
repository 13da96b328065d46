"""Makes the packaged tagger `package:realm-tagger`: a small network that repeats the annotations of a spaCy pipeline.

    python recipes/realm_tagger.py DATA OUT

DATA is a folder with `simplewiki/articles.jsonl.xz` and `enwiki_core/articles.jsonl.xz`: articles of two editions of Wikipedia,
JSON Lines {"id", "title", "text"}. OUT/realm-tagger is the tagger. The annotated articles are kept in OUT/annotated.npz. The
program takes about 40 minutes on one CPU core.

Axis letters: T words of some texts and an empty row after each text, F features, L labels.
"""

import json
import lzma
import os
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from realm.checksums import record_checksums
from realm.files import write_json
from realm.progress import progress
from realm.text.corpus import Annotations
from realm.text.salient_spans import load_tagger
from realm.text.tagger_network import COLUMNS, GAPS, KINDS, ROWS, WEIGHTS, cut, features

ARTICLES_READ = {"simplewiki": 5, "enwiki_core": 8}
"""Every 5th article of Simple English Wikipedia, and every 8th article of English Wikipedia."""
MEASURED = 400
"""Number of other articles of each edition on which the tagger is compared with the pipeline."""
PIPELINE = "spacy:en_core_web_sm"
WIDTH, LAYERS = 96, 3
EPOCHS, WINDOW, RATE, WARMUP, DROPOUT = 6, 4096, 2e-3, 200, 0.1
IGNORED = -1
"""Label of the empty rows."""


def main(data: Path, out: Path) -> None:
    """Annotates the articles, trains the network, and prints how well the network agrees with the pipeline."""
    os.environ["REALM_CACHE"] = (
        ""  # with kept annotations, the measured speed of the pipeline would be too high
    )
    out.mkdir(parents=True, exist_ok=True)
    file = out / "annotated.npz"
    if not file.exists():
        annotate(data, file)
    rows = np.load(file)
    kinds = [str(kind) for kind in rows["kinds"]]
    network = train(rows, 2 * len(kinds) + 1)
    folder = out / "realm-tagger"
    folder.mkdir(exist_ok=True)
    save_file({name: value.half() for name, value in network.state_dict().items()}, folder / WEIGHTS)
    write_json(folder / KINDS, kinds)
    (folder / "checksums.json").unlink(missing_ok=True)
    record_checksums(folder)
    print(json.dumps(measure(data, folder)))


def annotate(data: Path, file: Path) -> None:
    """Writes the features and labels of the articles: an array row for each word, and an empty row after each article."""
    texts = list(articles(data))
    kinds: dict[str, int] = {}
    parts = []
    annotated = load_tagger(PIPELINE, processes=0).annotate(texts)
    for text, found in progress(
        zip(texts, annotated, strict=True), total=len(texts), description="tag", unit="article"
    ):
        parts.append(labelled(text, found, kinds))
    feature_TF, gap_T, label_T, begins_T = (np.concatenate(part) for part in zip(*parts, strict=True))
    np.savez(file, features=feature_TF, gaps=gap_T, labels=label_T, begins=begins_T, kinds=list(kinds))


def articles(data: Path, first: int = 0, most: int | None = None) -> Iterator[str]:
    """The texts of the articles `first`, `first` + n, `first` + 2n, ... of each edition, where n is that of `ARTICLES_READ`."""
    for name, every in ARTICLES_READ.items():
        with lzma.open(data / name / "articles.jsonl.xz", "rt", encoding="utf-8") as file:
            end = None if most is None else first + most * every
            for line in islice(file, first, end, every):
                yield json.loads(line)["text"]


def labelled(
    text: str, annotations: Annotations, kinds: dict[str, int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Features [T, F], gaps, labels, and sentence beginnings of the words of a text and of an empty row; adds new kinds."""
    words = cut(text)
    size = len(words.start_T) + 1
    feature_TF = np.zeros((size, len(COLUMNS)), dtype=np.int32)
    for row, (start, end) in enumerate(zip(words.start_T, words.end_T, strict=True)):
        feature_TF[row] = features(text[start:end])
    label_T, begins_T = np.zeros(size, dtype=np.int8), np.zeros(size, dtype=np.int8)
    label_T[-1] = IGNORED
    for span in annotations.spans:
        kind = kinds.setdefault(span.label, len(kinds))
        first = np.searchsorted(words.end_T, span.start, side="right")
        end = np.searchsorted(words.start_T, span.end)
        label_T[first:end] = 2 * kind + 2
        label_T[first : min(first + 1, end)] = 2 * kind + 1
    begins_T[np.searchsorted(words.end_T, [start for start, _ in annotations.sentences], side="right")] = 1
    begins_T[-1] = 0
    return feature_TF, np.append(words.gap_T, 0).astype(np.int8), label_T, begins_T


class TrainedNetwork(nn.Module):
    """The network of `realm.text.tagger_network`, with the same names of weights."""

    def __init__(self, labels: int):
        super().__init__()
        sizes = {**ROWS, "gap": GAPS}
        tables = {name: nn.Embedding(rows, WIDTH) for name, rows in sizes.items()}
        for table in tables.values():
            nn.init.normal_(table.weight, std=0.3)
        self.tables = nn.ModuleDict(tables)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(LAYERS + 1))
        self.layers = nn.ModuleList(nn.Linear(3 * WIDTH, WIDTH) for _ in range(LAYERS))
        self.output = nn.Linear(WIDTH, labels + 1)

    def forward(self, feature_TF: Tensor, gap_T: Tensor, word_T1: Tensor) -> Tensor:
        """Scores [T, L + 1]."""
        columns = zip(COLUMNS, feature_TF.unbind(1), strict=True)
        input_TH = self.tables["gap"](gap_T) + sum(self.tables[name](row_T) for name, row_T in columns)
        state_TH = self.norms[0](F.dropout(input_TH, DROPOUT, self.training)) * word_T1
        for layer, norm in zip(self.layers, self.norms[1:], strict=True):
            padded_TH = F.pad(state_TH, (0, 0, 1, 1))
            beside_TF = torch.cat([padded_TH[:-2], padded_TH[1:-1], padded_TH[2:]], dim=1)
            change_TH = norm(F.relu(layer(beside_TF)))
            state_TH = state_TH + F.dropout(change_TH, DROPOUT, self.training) * word_T1
        scores: Tensor = self.output(state_TH)
        return scores


def train(rows: "np.lib.npyio.NpzFile", labels: int) -> TrainedNetwork:
    """Trains the network on windows of consecutive rows."""
    torch.manual_seed(0)
    feature_TF, gap_T = torch.from_numpy(rows["features"]), torch.from_numpy(rows["gaps"]).int()
    label_T, begins_T = torch.from_numpy(rows["labels"]).long(), torch.from_numpy(rows["begins"]).float()
    network = TrainedNetwork(labels)
    starts = torch.arange(0, len(label_T) - WINDOW, WINDOW)
    steps = EPOCHS * len(starts)
    optimizer = torch.optim.AdamW(network.parameters(), lr=RATE, weight_decay=0.01, fused=True)
    order = torch.cat([starts[torch.randperm(len(starts))] for _ in range(EPOCHS)])
    for step, start in enumerate(progress(order.tolist(), total=steps, description="train", unit="step")):
        window = slice(start, start + WINDOW)
        word_T = label_T[window] != IGNORED
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / WARMUP) * (1 - step / steps)
        score_TL = network(feature_TF[window], gap_T[window], word_T[:, None].float())
        loss = F.cross_entropy(score_TL[:, :-1], label_T[window], ignore_index=IGNORED)
        begin_loss = F.binary_cross_entropy_with_logits(score_TL[word_T, -1], begins_T[window][word_T])
        optimizer.zero_grad()
        (loss + 0.5 * begin_loss).backward()
        optimizer.step()
    return network.eval()


def measure(data: Path, folder: Path) -> dict[str, float]:
    """F1 of names (with and without their kind) and sentences, against those of the pipeline, on articles that were not used.

    Also the words a second of both, on one core.
    """
    texts = list(articles(data, first=1, most=MEASURED))
    words = sum(len(cut(text).start_T) for text in texts)
    found, speeds = [], []
    for tagger in (load_tagger(f"realm:{folder}"), load_tagger(PIPELINE)):
        began = time.process_time()
        found.append(list(tagger.annotate(texts)))
        speeds.append(words / (time.process_time() - began))
    ours, theirs = found
    return {
        "names": f1(
            [{span[:2] for span in one.spans} for one in ours],
            [{span[:2] for span in one.spans} for one in theirs],
        ),
        "names_with_kind": f1([set(one.spans) for one in ours], [set(one.spans) for one in theirs]),
        "sentences": f1([set(one.sentences) for one in ours], [set(one.sentences) for one in theirs]),
        "words_per_second": speeds[0],
        "words_per_second_of_the_pipeline": speeds[1],
    }


def f1(found: Sequence[set[Any]], expected: Sequence[set[Any]]) -> float:
    """F1 of sets, in percent."""
    both = sum(len(a & b) for a, b in zip(found, expected, strict=True))
    return 100 * 2 * both / (sum(map(len, found)) + sum(map(len, expected)))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python recipes/realm_tagger.py DATA OUT")
    main(Path(sys.argv[1]), Path(sys.argv[2]))
