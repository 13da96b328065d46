"""kNN-LM (Khandelwal et al. 2020) for masked spans: predictions of the model, mixed with the words at similar masks.

Each salient span of each sentence in the corpus is masked in turn. The datastore has one entry for each masked wordpiece: the
key is the state of the [MASK] before the output layer, and the value is the wordpiece. The distribution for a query is

    p(w) = lambda * sum over neighbours with value w of softmax(-squared distance / temperature) + (1 - lambda) * p_LM(w)

Entries from passages that repeat the text of the query are excluded, as REALM excludes the passage of a query. Lambda and the
temperature are chosen on half of the queries, and all results are reported on the other half. For comparison, the same model
also predicts the masked words of the same queries with retrieved passages, as in REALM.

Axis letters: B queries, K candidates or neighbours, P masked positions, N entries, H hidden, V vocabulary.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict, cast

import numpy as np
import torch
from numpy.lib.format import open_memmap
from torch import Tensor

from realm.checksums import checksums_of
from realm.errors import InputError, at_least
from realm.files import read_json, write_json
from realm.folders import check_made, make_once
from realm.masking.candidates import CANDIDATES, CandidateRule, choose_candidates, embed_queries, read_inputs
from realm.masking.held_out import held_out_queries
from realm.masking.masked_queries import MaskedQuery, count_targets, each_span, holds, repeats_text
from realm.model.device import DeviceConfig, Precision, autocast
from realm.model.folder import Model
from realm.model.manifest import model_path as path_of
from realm.model.modes import evaluating
from realm.model.states import states_at
from realm.progress import progress
from realm.qa.probe import open_for_probe
from realm.qa.scoring.significance import PairedDifference, paired_difference, percent, wilson_interval
from realm.qa.scoring.tables import aligned, difference
from realm.search.exact import PassageIndex
from realm.store.knowledge_base import KnowledgeBase, PassageTokens
from realm.tokens.layouts import NULL_PASSAGE, joint_inputs

ROWS = 256
"""Number of masked sentences per forward pass without passages."""
READ_AT_ONCE = 16
"""Number of masked sentences per forward pass with retrieved passages."""
DATASTORE = "datastore.json"
WRITTEN = "written.json"
ENCODER = "encoder/model.safetensors"
"""The weights of the encoder in the folder of a model."""
PASSAGES = 2048
"""Number of passages after whose entries a datastore is synced to disk."""
PASSAGES_SEED = 0
"""Seed of the random choice of passages for a smaller datastore."""
ENTRIES = 1 << 16
"""Number of entries that are compared with all queries at once."""
NEIGHBOURS = 1024
"""Number of neighbours of a masked wordpiece (published: 1024)."""
SPARE = 64
"""Number of entries that a search finds in addition to the wanted number; these entries replace excluded entries."""
LAMBDAS = tuple(round(0.05 * n, 2) for n in range(20))
TEMPERATURES = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


@dataclass(frozen=True)
class KnnConfig(DeviceConfig):
    """Settings of `realm knn`."""

    queries: int = 2000
    """Largest number of masked sentences. Lambda and the temperature are chosen on half of these sentences."""
    passages: int = 0
    """Largest number of passages whose spans are in the datastore; the passages are drawn at random. 0: all passages
    (published). A smaller datastore is written faster, and predicts less well."""

    def __post_init__(self) -> None:
        at_least(self, queries=2, passages=0)


class Predicted(TypedDict):
    """Quality of predictions of masked spans."""

    span_accuracy: float
    """Percentage of spans of which all wordpieces were predicted."""
    span_accuracy_ci95: list[float]
    """95 % interval of `span_accuracy`."""
    less: PairedDifference | None
    """Span accuracy of REALM minus this one; None for REALM."""
    nats: float
    """Mean negative log-likelihood per wordpiece."""
    nats_found: float | None
    """`nats` of the spans that a passage contains that REALM retrieves; None if there are none. A report in docs/tables can
    lack this key and the next."""
    nats_missed: float | None
    """`nats` of all other spans."""


class KnnJson(TypedDict):
    """The output of `realm knn`."""

    n: int
    """Number of queries on which the results are reported."""
    entries: int
    """Number of entries of the datastore."""
    knn_weight: float
    """Lambda."""
    temperature: float
    found: float
    """Percentage of spans that a passage contains that REALM retrieves. A report in docs/tables can lack this key."""
    model: Predicted
    """Predictions without passages and without neighbours."""
    knn_lm: Predicted
    realm: Predicted
    """Predictions with retrieved passages; p(z|x) is a softmax over these passages and the null passage."""
    realm_index: Predicted
    """The same, with a softmax over all passages of the index, as in training with `normalise = "index"`. A passage that was
    not retrieved counts as the null passage; training subtracts another 1.5 nats. A report in docs/tables can lack this key."""


PREDICTED_BY = {
    "model": "the model alone",
    "knn_lm": "kNN-LM",
    "realm": "REALM",
    "realm_index": "REALM, softmax over the index",
}
"""Key of `KnnJson` -> label in the table."""


class Datastore(NamedTuple):
    """Entries on disk, mapped into memory."""

    key_NH: np.ndarray
    """float16."""
    value_N: np.ndarray
    passage_N: np.ndarray


def open_datastore(
    model: Model, model_path: str, kb: KnowledgeBase, folder: Path, config: KnnConfig
) -> Datastore:
    """The datastore of a model and a knowledge base. It is made in `folder`, unless the folder already contains it.

    After a kill, the next call continues.
    """
    made_of = {
        "kb": kb.fingerprint,
        "spans": _spans_digest(kb.tokens),
        "encoder": checksums_of(path_of(model_path), [ENCODER])[ENCODER],
        "precision": config.precision,
        "query": str(model.lengths.query),
    }
    if config.passages:
        made_of["passages"] = str(config.passages)
    make_once(
        folder,
        DATASTORE,
        made_of,
        lambda aside: _write_datastore(model, kb.tokens, aside, config),
        continues=True,
    )
    return Datastore(
        *(np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("keys", "values", "passages"))
    )


def _spans_digest(tokens: PassageTokens) -> str:
    """Digest of the salient spans and the sentences, which depend on the tagger; the knowledge base's fingerprint does not."""
    digest = hashlib.sha256()
    for column in (tokens.sentences, tokens.span_starts, tokens.span_ends):
        digest.update(np.ascontiguousarray(column.offsets, dtype="<i8").data)
        digest.update(np.ascontiguousarray(column.values, dtype="<i4").data)
    return digest.hexdigest()[:16]


class _WrittenJson(TypedDict):
    """Content of written.json: how far a datastore is written."""

    entries: int
    """Number of entries of the complete datastore."""
    passages_done: int
    entries_done: int


def _write_datastore(model: Model, tokens: PassageTokens, folder: Path, config: KnnConfig) -> None:
    """Writes the entries in the order of the passages, after those that an interrupted call wrote."""
    chosen = _chosen_passages(len(tokens.body.lengths), config.passages)
    written = _written(model, tokens, chosen, folder)
    count, end = written["entries"], written["entries_done"]
    mode: Literal["r+", "w+"] = "r+" if end else "w+"
    width = model.reader.config.hidden_size
    keys = open_memmap(folder / "keys.npy", mode=mode, dtype=np.float16, shape=(count, width))
    values = open_memmap(folder / "values.npy", mode=mode, dtype=np.int32, shape=(count,))
    passages = open_memmap(folder / "passages.npy", mode=mode, dtype=np.int64, shape=(count,))
    with progress(total=count, description="datastore", unit="entry", done=end) as bar:
        for first in range(written["passages_done"], len(chosen), PASSAGES):
            block = chosen[first : first + PASSAGES].tolist()
            queries = [
                query
                for passage in block
                for query in each_span(tokens, passage, model.tokenizer.mask_id, model.lengths.query - 2)
            ]
            widths = np.array([len(query.targets) for query in queries], dtype=np.int64)
            starts = end + np.cumsum(widths) - widths
            here = slice(end, end := end + int(widths.sum()))
            values[here] = np.concatenate(
                [np.zeros(0, dtype=np.int32), *(query.targets for query in queries)]
            )
            passages[here] = np.repeat([query.passage for query in queries], widths)
            # Attention multiplies rows of the same length together, so these rows are neighbours in a batch.
            order = np.lexsort((widths, np.array([len(query.ids) for query in queries])))
            for start in range(0, len(order), ROWS):
                part = order[start : start + ROWS]
                state_PH = mask_states(model, [queries[row] for row in part], config.precision)
                place_P = np.concatenate([starts[row] + np.arange(widths[row]) for row in part])
                keys[place_P] = state_PH.cpu().numpy().astype(np.float16)
                bar.update(len(state_PH))
            for array in (keys, values, passages):
                array.flush()
            write_json(
                folder / WRITTEN, {**written, "passages_done": first + len(block), "entries_done": end}
            )


def _chosen_passages(count: int, most: int) -> np.ndarray:
    """Numbers of the passages whose spans are entries, ascending; all passages if `most` is 0."""
    if not most:
        return np.arange(count)
    return np.sort(np.random.default_rng(PASSAGES_SEED).permutation(count)[:most])


def _written(model: Model, tokens: PassageTokens, chosen: np.ndarray, folder: Path) -> _WrittenJson:
    """How far the datastore is written. For a new datastore, the entries are counted."""
    if (folder / WRITTEN).is_file():
        return cast(_WrittenJson, read_json(folder / WRITTEN))
    count = int(count_targets(tokens, model.lengths.query - 2)[chosen].sum())
    if not count:
        advice = "raise passages" if len(chosen) < len(tokens.body.lengths) else "use another tagger"
        raise InputError(f"no passage of the datastore has a salient span: {advice}")
    return {"entries": count, "passages_done": 0, "entries_done": 0}


@torch.no_grad()
def mask_states(model: Model, queries: Sequence[MaskedQuery], precision: Precision = "fp32") -> Tensor:
    """States before the output layer at the masked positions of all queries, read without a passage -> [P, H] float32."""
    nothing = np.zeros(0, dtype=np.int64)
    joint = joint_inputs(
        [query.ids for query in queries], [nothing] * len(queries), model.tokenizer, model.lengths
    )
    row_P = torch.from_numpy(np.repeat(np.arange(len(queries)), [len(query.targets) for query in queries]))
    position_P = torch.from_numpy(np.concatenate([query.positions for query in queries]) + 1)
    reader, device = model.reader, model.device
    with evaluating(reader), autocast(device, precision):
        state_PH = states_at(reader.bert.bert, joint.to(device), row_P.to(device), position_P.to(device))
        transformed_PH: Tensor = reader.bert.cls.predictions.transform(state_PH)
    return transformed_PH.float()


class Neighbours(NamedTuple):
    """The nearest entries of each masked position, nearest first. If entries are missing, their distances are infinite."""

    distance_PK: Tensor
    """Squared Euclidean distance."""
    value_PK: Tensor


def nearest(
    store: Datastore, state_PH: Tensor, query_P: Sequence[MaskedQuery], tokens: PassageTokens, count: int
) -> Neighbours:
    """The nearest entries of each position, by exact search.

    The result has the `count` nearest of the `count + SPARE` nearest entries that are not excluded. Entries from passages that
    repeat the text of the query are excluded.
    """
    state_PH = state_PH.cpu()
    depth = min(count + SPARE, len(store.value_N))
    distance_PK = torch.full((len(state_PH), 0), torch.inf)
    place_PK = torch.zeros(len(state_PH), 0, dtype=torch.int64)
    for start in range(0, len(store.value_N), ENTRIES):
        key_NH = torch.from_numpy(np.array(store.key_NH[start : start + ENTRIES])).float()
        distance_PN = torch.addmm(key_NH.square().sum(dim=1), state_PH, key_NH.T, alpha=-2)
        # Later chunks have few entries that are nearer than the `depth` nearest so far, and a small topk is faster.
        most = len(key_NH)
        if distance_PK.shape[1] == depth:
            most = int((distance_PN < distance_PK[:, -1:]).sum(dim=1).max())
        found = distance_PN.topk(min(depth, most), dim=1, largest=False)
        both_PK = torch.cat([distance_PK, found.values], dim=1)
        distance_PK, order_PK = both_PK.topk(min(depth, both_PK.shape[1]), dim=1, largest=False)
        place_PK = torch.cat([place_PK, found.indices + start], dim=1).gather(1, order_PK)
    distance_PK = distance_PK + state_PH.square().sum(dim=1, keepdim=True)
    distance_PK = distance_PK.masked_fill(
        ~_allowed(store.passage_N[place_PK.numpy()], query_P, tokens), torch.inf
    )
    distance_PK, order_PK = distance_PK.topk(min(count, depth), dim=1, largest=False)
    value_PK = torch.from_numpy(
        np.asarray(store.value_N[place_PK.gather(1, order_PK).numpy()], dtype=np.int64)
    )
    return Neighbours(distance_PK, value_PK)


def _allowed(passage_PK: np.ndarray, query_P: Sequence[MaskedQuery], tokens: PassageTokens) -> Tensor:
    """False at passages that repeat the text of the query of the position -> [P, K] bool."""
    allowed_PK = np.ones(passage_PK.shape, dtype=bool)
    refused: dict[int, list[int]] = {}
    for row, query in enumerate(query_P):
        if row == 0 or query is not query_P[row - 1]:
            refused = {}
        for number in np.unique(passage_PK[row]).tolist():
            if number not in refused:
                repeats = number == query.passage or repeats_text(query.original, tokens.body.row(number))
                refused[number] = [number] if repeats else []
        allowed_PK[row] = ~np.isin(passage_PK[row], [number for one in refused.values() for number in one])
    return torch.from_numpy(allowed_PK)


def knn_probability(found: Neighbours, temperature: float, vocabulary: int) -> Tensor:
    """p(w) computed from the neighbours -> [P, V]; all 0 for a position without neighbours."""
    share_PK = (-found.distance_PK / temperature).softmax(dim=1).nan_to_num()
    return torch.zeros(len(share_PK), vocabulary).scatter_add_(1, found.value_PK, share_PK)


def measure(kb: KnowledgeBase, model_path: str, folder: Path, config: KnnConfig) -> KnnJson:
    """Predicts held-out masked spans with the model alone, with kNN-LM, and with retrieved passages.

    The datastore and the report (report.json) are saved in `folder`.

    Raises:
        InputError: the model and the knowledge base do not belong together, the index is missing, there are too few queries, or
            `folder` has other files.
    """
    check_made(folder, DATASTORE)
    model, index, spans = open_for_probe(kb, model_path, config.device)
    queries = held_out_queries(kb, model.lengths.query - 2, config.queries, spans)
    dev, test = queries[::2], queries[1::2]
    if not test:
        raise InputError(
            f"{kb.folder} has {len(queries)} held-out masked facts that another passage contains: at least 2 are needed"
        )
    store = open_datastore(model, model_path, kb, folder, config)
    lm_PV, found = _read(model, kb.tokens, store, dev, config)
    target_P = _targets(dev)
    _, temperature, weight = min(
        (_nats(mix(lm_PV, knn_PV, weight), target_P), temperature, weight)
        for temperature in TEMPERATURES
        for knn_PV in [knn_probability(found, temperature, lm_PV.shape[1])]
        for weight in LAMBDAS
    )
    lm_PV, found = _read(model, kb.tokens, store, test, config)
    knn_PV = knn_probability(found, temperature, lm_PV.shape[1])
    realm_PV, realm_index_PV, found_Q = realm_probability(model, kb.tokens, index, test, config)
    right_Q = spans_predicted(realm_PV, test)
    report: KnnJson = {
        "n": len(test),
        "entries": len(store.value_N),
        "knn_weight": weight,
        "temperature": temperature,
        "found": percent(found_Q.mean()),
        "model": _scored(lm_PV, test, found_Q, right_Q),
        "knn_lm": _scored(mix(lm_PV, knn_PV, weight), test, found_Q, right_Q),
        "realm": _scored(realm_PV, test, found_Q),
        "realm_index": _scored(realm_index_PV, test, found_Q, right_Q),
    }
    write_json(folder / "report.json", report)
    return report


def mix(lm_PV: Tensor, knn_PV: Tensor, weight: float) -> Tensor:
    """lambda p_kNN + (1 - lambda) p_LM, where lambda is `weight` -> [P, V]; p_LM for positions without neighbours."""
    weight_P1 = weight * (knn_PV.sum(dim=1, keepdim=True) > 0)
    return weight_P1 * knn_PV + (1 - weight_P1) * lm_PV


def _read(
    model: Model, tokens: PassageTokens, store: Datastore, queries: Sequence[MaskedQuery], config: KnnConfig
) -> tuple[Tensor, Neighbours]:
    """p_LM(w) at all masked positions [P, V], and the neighbours of these positions."""
    states = [
        mask_states(model, queries[start : start + ROWS], config.precision)
        for start in range(0, len(queries), ROWS)
    ]
    state_PH = torch.cat(states)
    with torch.no_grad():
        lm_PV = model.reader.bert.cls.predictions.decoder(state_PH).float().softmax(dim=1).cpu()
    query_P = [query for query in queries for _ in query.targets]
    return lm_PV, nearest(store, state_PH, query_P, tokens, NEIGHBOURS)


@torch.no_grad()
def realm_probability(
    model: Model,
    tokens: PassageTokens,
    index: PassageIndex,
    queries: Sequence[MaskedQuery],
    config: KnnConfig,
) -> tuple[Tensor, Tensor, np.ndarray]:
    """p(w|x) at all masked positions, and for each query whether a retrieved passage contains the masked span -> bool [Q].

    p(w|x) is the sum of p(z|x) p(w|z,x) over retrieved passages -> [P, V]; and the same sum with p(z|x) over the whole index,
    in which a passage that was not retrieved has the p(w|z,x) of the null passage -> [P, V].
    """
    rule = CandidateRule(CANDIDATES, same_corpus=True)
    read_parts: list[Tensor] = []
    index_parts: list[Tensor] = []
    found: list[bool] = []
    with (
        evaluating(model.reader, model.embedder),
        progress(total=len(queries), description="read passages", unit="query") as bar,
    ):
        for start in range(0, len(queries), READ_AT_ONCE):
            part = queries[start : start + READ_AT_ONCE]
            query_BD = embed_queries(model, part)
            chosen = choose_candidates(part, query_BD, index, tokens, rule)
            found += [
                any(holds(tokens.body.row(n), query.targets) for n in numbers if n != NULL_PASSAGE)
                for query, numbers in zip(part, chosen.number_BK, strict=True)
            ]
            batch = read_inputs(part, chosen.number_BK, tokens, model.tokenizer, model.lengths).to(
                model.device
            )
            with autocast(model.device, config.precision):
                _, score_BK = model.embedder.score(batch.queries, batch.passages, batch.place_BK)
                logp_PKV = model.reader.vocabulary_logp(batch.joint, batch.position_BM, batch.mask_BM)
            row_P, _ = batch.mask_BM.nonzero(as_tuple=True)
            rest_B1 = index.rest_logsumexp(query_BD, chosen.not_in_rest())[:, None].to(score_BK.device)
            for parts, score_BE, logp_PEV in (
                (read_parts, score_BK.float(), logp_PKV),
                (
                    index_parts,
                    torch.cat([score_BK.float(), rest_B1], dim=1),
                    torch.cat([logp_PKV, logp_PKV[:, :1]], dim=1),
                ),
            ):
                prior_PE1 = score_BE.log_softmax(dim=1)[row_P][:, :, None]
                parts.append((prior_PE1 + logp_PEV).logsumexp(dim=1).exp().cpu())
            bar.update(len(part))
    return torch.cat(read_parts), torch.cat(index_parts), np.array(found)


def _targets(queries: Sequence[MaskedQuery]) -> Tensor:
    return torch.from_numpy(np.concatenate([query.targets for query in queries]).astype(np.int64))


def _nats(probability_PV: Tensor, target_P: Tensor) -> float:
    """Mean negative log-likelihood of the targets; a probability of 0 counts as 1e-30."""
    return float(-probability_PV.gather(1, target_P[:, None]).clamp_min(1e-30).log().mean())


def spans_predicted(probability_PV: Tensor, queries: Sequence[MaskedQuery]) -> np.ndarray:
    """Whether all wordpieces of the span of each query have the highest probability -> bool [Q]."""
    right_P = (probability_PV.argmax(dim=1) == _targets(queries)).numpy()
    ends = np.cumsum([len(query.targets) for query in queries])
    return np.array([part.all() for part in np.split(right_P, ends[:-1])])


def _scored(
    probability_PV: Tensor,
    queries: Sequence[MaskedQuery],
    found_Q: np.ndarray,
    realm_Q: np.ndarray | None = None,
) -> Predicted:
    right_Q, target_P = spans_predicted(probability_PV, queries), _targets(queries)
    found_P = torch.from_numpy(np.repeat(found_Q, [len(query.targets) for query in queries]))

    def nats(chosen_P: Tensor) -> float | None:
        return round(_nats(probability_PV[chosen_P], target_P[chosen_P]), 3) if chosen_P.any() else None

    return {
        "span_accuracy": percent(right_Q.mean()),
        "span_accuracy_ci95": [percent(end) for end in wilson_interval(int(right_Q.sum()), len(right_Q))],
        "less": None if realm_Q is None else paired_difference(realm_Q, right_Q, 1),
        "nats": round(_nats(probability_PV, target_P), 3),
        "nats_found": nats(found_P),
        "nats_missed": nats(~found_P),
    }


def table(report: KnnJson) -> list[list[str]]:
    """The report as rows of cells; the first row is the heading."""
    named = {key: label for key, label in PREDICTED_BY.items() if key in report}
    heading = ["whole spans predicted, %", "REALM minus row", "nats per wordpiece"]
    parts = [key for key in ("nats_found", "nats_missed") if key in report["realm"]]
    if parts:
        found, missed = report["found"], 100 - report["found"]
        heading += [f"span retrieved ({found:.1f} %)", f"others ({missed:.1f} %)"]
    rows = [[f"{report['n']:,} masked facts", *heading]]
    for key, label in named.items():
        one: Predicted = report[key]  # type: ignore[literal-required]
        low, high = one["span_accuracy_ci95"]
        less = "-" if one["less"] is None else difference(one["less"])
        nats = [
            "-" if (value := cast(Any, one)[part]) is None else f"{value:.3f}" for part in ("nats", *parts)
        ]
        rows.append([label, f"{one['span_accuracy']:.1f} ({low:.1f}-{high:.1f})", less, *nats])
    return rows


def lines(report: KnnJson) -> list[str]:
    """The report as lines for a terminal: two tables, because one would be wider than most terminals."""
    rows = table(report)
    return [
        *aligned([row[:3] for row in rows]),
        "",
        *aligned([[row[0], *row[3:]] for row in rows]),
        "",
        f"The datastore has {report['entries']:,} entries. Lambda ({report['knn_weight']:g}) and the temperature "
        f"({report['temperature']:g}) were chosen on as many other masked facts.",
    ]
