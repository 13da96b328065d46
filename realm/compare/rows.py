"""Definitions of the rows of Table 1 and Table 2: the model from which a row starts, and the settings of the commands of a row.

A row has only the settings that differ from the preset. All other settings are those of the preset, which are the same for all
rows.
"""

from typing import Literal, NamedTuple


class Start(NamedTuple):
    """A model from which training on questions starts. The model itself was not trained on questions."""

    label: str
    """Name in the tables."""
    init: str = "ict"
    """Name in `STARTS` of the model from which the command starts; "" if the command starts from none of these models."""
    made_by: Literal["mlm", "ict", "pretrain", "convert", "published"] = "pretrain"
    """Command of `realm` that makes this model from `init`. "published": `realm convert`, from a published checkpoint."""
    settings: tuple[str, ...] = ()
    """Settings of the command `made_by`."""
    other_text: bool = False
    """Whether the masked sentences come from a corpus X other than the knowledge base Z."""
    stale: int = 1
    """Factor by which the number of steps between two index builds is multiplied."""
    encoder_of: str = ""
    """Name in `STARTS` of a model whose encoder replaces the encoder of `init`, without training; "": nothing is replaced."""
    beside: str = "realm"
    """Name in `STARTS` of the model with which the tables compare this model. A table with another name than "realm" also has
    the row of this name."""


def _other_masks(label: str, masking: str) -> Start:
    # Positives are the passages with the same salient span. A random mask rarely has any, so with injected positives, salient
    # masks would differ from random masks in more than the masks.
    return Start(label, settings=(f"masking={masking}", "injected=0"), beside="no-injected")


PUBLISHED = "published"
BM25 = "bm25"
"""Name of BM25 in the table of starts."""

STARTS = {
    "encoder": Start("encoder before training", "", "mlm"),
    "ict": Start("ICT", "encoder", "ict"),
    "realm": Start("REALM"),
    "realm-x": Start("REALM, X other than Z", other_text=True),
    "realm-retriever": Start(
        "REALM retriever, baseline encoder", "realm", made_by="convert", encoder_of="ict"
    ),
    "realm-encoder": Start("baseline retriever, REALM encoder", made_by="convert", encoder_of="realm"),
    "random-masks": _other_masks("random uniform masks", "token"),
    "bert-masks": _other_masks("random masks, 80/10/10", "bert"),
    "random-spans": _other_masks("random span masks", "span"),
    "stale": Start("30x stale index", stale=30),
    "no-null": Start("no null passage", settings=("null_passage=false",)),
    "own-passage": Start("own passage not excluded", settings=("exclude_own=false",)),
    "per-token": Start("marginal per token", settings=("marginal=token",)),
    "towers-encoder": Start(
        "two towers, before training",
        "encoder",
        "mlm",
        ("steps=0", "embedder_start=given", "embedder.shared=false"),
    ),
    "towers-ict": Start("two towers, ICT", "towers-encoder", "ict"),
    "two-towers": Start("two towers", "towers-ict"),
    "no-ict": Start("no ICT", "encoder", settings=("ict=0.0",)),
    "no-warmup": Start("no warm-up", settings=("warmup=0",)),
    "no-guard": Start("no health checks", settings=("health.gate=0.0", "health.margin=-1.0")),
    "no-injected": Start("no injected positives", settings=("injected=0",)),
    "bm25-candidates": Start("two candidates from BM25", settings=("bm25=2",)),
    PUBLISHED: Start("published REALM", "", "published"),
}
"""Name of a start -> how the start is made. `no-ict` has no ICT term in the loss of pre-training, even if the preset does."""

WITHOUT_ICT = {"ict": "encoder", "towers-ict": "towers-encoder"}
"""Name of a start that ICT makes -> the start that takes its place if `data.warm_start` is false."""


def label_of(start: str) -> str:
    """Name of a start or of BM25 in the tables."""
    return "BM25" if start == BM25 else STARTS[start].label


def beside(start: str) -> str:
    """Name of the start with which the tables compare a start or BM25."""
    return "realm" if start == BM25 else STARTS[start].beside


def encoder_of(start: str) -> str:
    """Name of the start that made the encoder of a start: ICT and "convert" do not train the encoder."""
    one = STARTS[start]
    if one.made_by == "convert":
        return encoder_of(one.encoder_of)
    return encoder_of(one.init) if one.made_by == "ict" else start


class Row(NamedTuple):
    """A row of a table: a system, and the command that trains it on questions."""

    label: str
    start: str = "encoder"
    """Name of the start of the row in `STARTS`."""
    system: str = ""
    """Name of the system for `realm baseline`, which trains the row; empty: `realm finetune` trains the row."""
    settings: tuple[str, ...] = ()
    """Settings of the command that trains the row."""
    of: str = ""
    """Row whose trained model answers the questions of this row; empty: the row has a model of its own."""
    method: str = ""
    """Method of retrieval for answers; empty: the default method of the trained model."""


def row_settings(row: Row, seed: int) -> tuple[str, ...]:
    """Settings of the command that trains a row with a seed."""
    return (*row.settings, f"seed={seed}")


def _named_as_starts(*starts: str) -> dict[str, Row]:
    """Rows with the names and the labels of their starts."""
    return {name: Row(STARTS[name].label, start=name) for name in starts}


WORDS = ("method=bm25", "retriever_rate=0.0", "retrieval_score=false")
"""Settings of a reader that reads passages of BM25. The retrieval score is not part of the score of an answer."""

READING_SETTINGS = (
    "passages=contrast",
    "read=1",
    "retrieved=1",
    "reader_gradient=all",
    "retriever_rate=0.0",
)
"""Settings of `realm finetune` for the questions of `data.reading`: each question has one passage, which contains an answer."""

GIVEN = "given"
"""The row whose embedder is that of the encoder. It is made only if `data.warm_start` is false."""
DRQA = "drqa"
OWN_NETWORK = ("t5", DRQA)
"""Systems whose network does not start from the encoder of a model."""

TABLE_1 = {
    "bm25-reader": Row("BM25 + reader", settings=WORDS),
    "first-match": Row("BM25 + reader, first match", settings=(*WORDS, "span_loss=first")),
    "t5": Row("T5, closed book", system="t5"),
    "drqa": Row("DrQA", system="drqa"),
    "hard-em": Row("HardEM", settings=(*WORDS, "span_loss=hard-em")),
    "graph": Row("GraphRetriever", system="graph"),
    "path": Row("PathRetriever", system="path"),
    "orqa": Row("ORQA", start="ict"),
    GIVEN: Row("embedder of the encoder", start="encoder"),
    "realm": Row("REALM, X = Z", start="realm"),
    **_named_as_starts("realm-x"),
    "realm-mixture": Row("REALM, sum over passages", start="realm", settings=("objective=mixture",)),
    "hybrid": Row("REALM + BM25", of="realm", method="hybrid"),
    **_named_as_starts(PUBLISHED),
}
"""Systems of Table 1 of the REALM paper, in the order of that table, and other systems."""

TABLE_2 = {
    **_named_as_starts("realm", "realm-retriever", "realm-encoder"),
    "orqa": Row("baseline (ORQA)", start="ict"),
    GIVEN: Row("baseline (embedder of the encoder)", start="encoder"),
    **_named_as_starts("no-injected", "random-masks", "bert-masks", "random-spans", "stale"),
    **_named_as_starts("no-null", "own-passage", "per-token", "two-towers", "no-ict"),
    **_named_as_starts("no-warmup", "no-guard", "bm25-candidates"),
}
"""Ablations of Table 2 of the REALM paper, and further ablations."""

TABLES = {"Table 1": TABLE_1, "Table 2": TABLE_2}
