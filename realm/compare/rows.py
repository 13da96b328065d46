"""The rows of Table 1 and Table 2, as data: the model that each row starts from, and the settings of its commands.

Rows name the settings that differ from the preset; all other settings are those of the preset, for every row alike.
"""

from typing import Literal, NamedTuple


class Start(NamedTuple):
    """A model that fine-tuning starts from, without any question: its retriever and its encoder."""

    init: str = "ict"
    """Start that the command continues; "" for the first of all, and for a published model."""
    made_by: Literal["mlm", "ict", "pretrain", "convert", "published"] = "pretrain"
    """Command of `realm` that makes it, from `init`; "published": `realm convert`, from a published checkpoint."""
    settings: tuple[str, ...] = ()
    """Settings of that command."""
    other_text: bool = False
    """Masked sentences come from the other corpus (X different from Z)."""
    stale: int = 1
    """Factor on the number of steps between two index builds."""
    encoder_of: str = ""
    """Start whose encoder replaces that of `init`, without training."""


PUBLISHED = "published"

STARTS = {
    "encoder": Start("", "mlm"),
    "ict": Start("encoder", "ict"),
    "realm": Start(),
    "realm-x": Start(other_text=True),
    "realm-retriever": Start("realm", "convert", encoder_of="ict"),
    "realm-encoder": Start("ict", "convert", encoder_of="realm"),
    "random-masks": Start(settings=("masking=token",)),
    "bert-masks": Start(settings=("masking=bert",)),
    "random-spans": Start(settings=("masking=span",)),
    "stale": Start(stale=30),
    "no-null": Start(settings=("null_passage=false",)),
    "own-passage": Start(settings=("exclude_own=false",)),
    "per-token": Start(settings=("marginal=token",)),
    "towers-encoder": Start("encoder", "mlm", ("steps=0", "embedder_start=given", "embedder.shared=false")),
    "towers-ict": Start("towers-encoder", "ict"),
    "two-towers": Start("towers-ict"),
    "no-ict": Start("encoder", settings=("ict=0.0",)),
    "no-warmup": Start(settings=("warmup=0",)),
    "no-guard": Start(settings=("health.gate=0.0", "health.margin=-1.0")),
    "no-injected": Start(settings=("injected=0",)),
    PUBLISHED: Start("", "published"),
}
"""Start -> how it is made. Where a preset adds ICT to the loss of pre-training, `no-ict` has none there either."""


class Row(NamedTuple):
    """A row of a table: a system, and the command that trains it on questions."""

    label: str
    start: str = "encoder"
    """Its start, a name in `STARTS`."""
    system: str = ""
    """Trained by `realm baseline` under this name; empty: by `realm finetune`."""
    settings: tuple[str, ...] = ()
    """Settings of that command."""
    of: str = ""
    """Row whose trained model answers; nothing is trained."""
    method: str = ""
    """Method by which the model retrieves when it answers; empty: its own."""


WORDS = ("method=bm25", "retriever_rate=0.0", "retrieval_score=false")
"""Settings of a reader that reads BM25's passages, whose score is no part of an answer's score."""

TABLE_1 = {
    "bm25-reader": Row("BM25 + reader", settings=WORDS),
    "first-match": Row("BM25 + reader, first match", settings=(*WORDS, "span_loss=first")),
    "t5": Row("T5, closed book", system="t5"),
    "drqa": Row("DrQA", system="drqa"),
    "hard-em": Row("HardEM", settings=(*WORDS, "span_loss=hard-em")),
    "graph": Row("GraphRetriever", system="graph"),
    "path": Row("PathRetriever", system="path"),
    "orqa": Row("ORQA", start="ict"),
    "realm": Row("REALM, X = Z", start="realm"),
    "realm-x": Row("REALM, X other than Z", start="realm-x"),
    "realm-mixture": Row("REALM, sum over passages", start="realm", settings=("objective=mixture",)),
    "hybrid": Row("REALM + BM25", of="realm", method="hybrid"),
    "published": Row("published REALM", start=PUBLISHED),
}
"""Systems of the paper's Table 1, in its order, and what else a practitioner would compare."""

TABLE_2 = {
    "realm": Row("REALM", start="realm"),
    "realm-retriever": Row("REALM retriever, baseline encoder", start="realm-retriever"),
    "realm-encoder": Row("baseline retriever, REALM encoder", start="realm-encoder"),
    "orqa": Row("baseline (ORQA)", start="ict"),
    "random-masks": Row("random uniform masks", start="random-masks"),
    "bert-masks": Row("random masks, 80/10/10", start="bert-masks"),
    "random-spans": Row("random span masks", start="random-spans"),
    "stale": Row("30x stale index", start="stale"),
    "no-null": Row("no null passage", start="no-null"),
    "own-passage": Row("own passage not excluded", start="own-passage"),
    "per-token": Row("marginal per token", start="per-token"),
    "two-towers": Row("two towers", start="two-towers"),
    "no-ict": Row("no ICT", start="no-ict"),
    "no-warmup": Row("no warm-up", start="no-warmup"),
    "no-guard": Row("no health checks", start="no-guard"),
    "no-injected": Row("no injected positives", start="no-injected"),
}
"""Ablations of the paper's Table 2, and ours."""
