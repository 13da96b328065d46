"""The networks: a BERT three ways.

    Embedder       text -> vector                     the knowledge retriever of REALM section 3.2
    MaskedReader   query + passage -> words           the knowledge-augmented encoder of REALM section 3.2
    SpanReader     question + passage -> span scores  ORQA section 3, REALM section 3.2 "fine-tuning"

Letters: B rows, T tokens, H hidden, D embedding, V vocabulary, P predicted positions, W span widths.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from realm.checksums import check_folder
from realm.config import InputError, reason
from realm.model.bert import Bert, BertConfig, MaskedBert
from realm.model.bert_files import load_bert, read_weights, save_bert
from realm.model.copying import CopyHead, mixed_target_logp, mixed_vocabulary_logp
from realm.model.cpu.dropout import FastDropout
from realm.model.cpu.packed import hidden_states, states_at, undivided
from realm.model.scores import own_scores
from realm.model.tensor_files import load_tensors, save_tensors
from realm.tokens.hub import PACKAGED, encoder_folder
from realm.tokens.layouts import Tokens
from realm.tokens.tokenizer import Tokenizer

COPY_HEAD = "copy_head.safetensors"
"""Beside the encoder's own weights, where it has a copy head."""

IMPORTANCE_RATE = 10.0
"""Learning rate of a word's log importance, in that of its embedding."""

ROWS_AT_ONCE = 64
"""Joint rows that the reader takes together; more only adds padding and memory."""

Pooling = Literal["cls", "mean", "words"]
Norm = Literal["layer", "unit"]


@dataclass(frozen=True)
class EmbedderConfig:
    """How a text becomes a vector."""

    dim: int = 128
    """Width of the vectors (paper: 128)."""
    pooling: Pooling = "mean"
    """"cls": BERT's pooled output, tanh(dense([CLS])) (released code). "mean": mean of the states of all tokens.
    "words": mean of the word embeddings, each weighted by how telling its word is, no layers: what a trunk that has read
    too little to embed sentences is replaced by, and what a CPU can train in minutes."""
    norm: Norm = "unit"
    """"layer": LayerNorm, raw inner products (released code). "unit": unit vectors, scores are `scale` x cosine."""
    scale: float = 20.0
    """Scores lie in +-scale with norm "unit"; unused with "layer"."""
    shared: bool = True
    """One tower for queries and passages (released default); False: two, starting equal (as the paper writes it)."""

    def __post_init__(self) -> None:
        if not 1 <= self.dim < 2**31:
            raise ValueError(f"dim is {self.dim}: it must be 1 or more, and fit 32 bits")
        if not 0 < self.scale < math.inf:
            raise ValueError(f"scale is {self.scale}: it must be above 0, and finite")


@dataclass(frozen=True)
class TrunkConfig:
    """A small BERT from random weights; unused where an encoder is given."""

    layers: int = 4
    """Transformer layers."""
    hidden: int = 256
    """Width of the states; the feed-forward is four times as wide."""
    heads: int = 4
    """Attention heads; divides `hidden`."""
    positions: int = 512
    """Longest input."""


class Tower(nn.Module):
    """One side of the embedder: tokens -> vectors whose inner product is the retrieval score."""

    kept_rows: int = 0
    """See `keep_rows`."""

    def __init__(self, trunk: BertConfig, config: EmbedderConfig):
        super().__init__()
        self.config = config
        self.projection = nn.Linear(trunk.hidden_size, config.dim)
        self.norm = (
            nn.LayerNorm(config.dim, eps=trunk.layer_norm_eps) if config.norm == "layer" else nn.Identity()
        )
        self.dropout = FastDropout(trunk.hidden_dropout_prob)
        nn.init.xavier_uniform_(self.projection.weight)
        nn.init.zeros_(self.projection.bias)

    def pooled(self, tokens: Tokens) -> Tensor:
        """One state per row -> [B, H]."""
        raise NotImplementedError

    def start_from(self, bert: Bert) -> None:
        """Takes what it needs of an encoder's weights."""
        raise NotImplementedError

    def forward(self, tokens: Tokens) -> Tensor:
        """Vectors -> [B, D], float32 whatever the autocast."""
        if not (self.kept_rows and torch.is_grad_enabled()):
            return self.project(self.pooled(tokens))
        rows = torch.arange(len(tokens.ids_BT), device=tokens.ids_BT.device)
        return torch.cat(
            [
                recomputed(lambda part: self.project(self.pooled(part)), tokens.rows(chunk))
                for chunk in rows.split(self.kept_rows)
            ]
        )

    def project(self, pooled_BH: Tensor) -> Tensor:
        """Vectors of texts with these pooled states -> [B, D] float32."""
        with torch.autocast(
            pooled_BH.device.type, enabled=False
        ):  # small differences of large numbers: not in bf16
            vector_BD = self.norm(self.projection(pooled_BH.float()))
        if self.config.norm == "unit":
            return F.normalize(vector_BD, dim=-1) * self.config.scale**0.5
        return self.dropout(vector_BD)


class TrunkTower(Tower):
    """A BERT whose states are pooled."""

    def __init__(self, trunk: BertConfig, config: EmbedderConfig):
        super().__init__(trunk, config)
        self.trunk = Bert(trunk, pooler=config.pooling == "cls")

    def pooled(self, tokens: Tokens) -> Tensor:
        if self.trunk.pooler is not None:
            rows_B = torch.arange(len(tokens.ids_BT), device=tokens.ids_BT.device)
            cls_BH = states_at(self.trunk, tokens, rows_B, torch.zeros_like(rows_B))
            return self.trunk.pooler(cls_BH)
        states_BTH = hidden_states(self.trunk, tokens)
        real_BT1 = tokens.mask_BT[:, :, None].float()
        return (states_BTH * real_BT1).sum(dim=1) / real_BT1.sum(dim=1)

    def start_from(self, bert: Bert) -> None:
        states = {k: v for k, v in bert.state_dict().items() if not k.startswith("pooler.")}
        self.trunk.load_state_dict(states, strict=self.config.pooling != "cls")


class WordTower(Tower):
    """Word embeddings, weighted by how telling each word is; no layers, so a corpus is embedded in a second."""

    def __init__(self, trunk: BertConfig, config: EmbedderConfig):
        super().__init__(trunk, config)
        self.words = nn.Embedding(trunk.vocab_size, trunk.hidden_size)
        self.slow_log_importance = nn.Embedding(trunk.vocab_size, 1)
        nn.init.zeros_(self.slow_log_importance.weight)

    def pooled(self, tokens: Tokens) -> Tensor:
        weight_BT = tokens.mask_BT * self.importance(tokens.ids_BT)
        # The null passage has no word that weighs much: the floor keeps its gradient from drowning the others'.
        total_B1 = weight_BT.sum(dim=1, keepdim=True).clamp_min(1.0)
        # One pass over the words' rows, four times as fast as to gather them, weigh them and add them up.
        sum_BH = F.embedding_bag(tokens.ids_BT, self.words.weight, mode="sum", per_sample_weights=weight_BT)
        return sum_BH / total_B1

    def start_from(self, bert: Bert) -> None:
        self.words.load_state_dict(bert.embeddings.word_embeddings.state_dict())

    def importance(self, ids: Tensor) -> Tensor:
        """How much each word counts -> shape of `ids`.

        Its logarithm learns `IMPORTANCE_RATE` times as fast as an embedding's coordinates: at the same rate real questions
        stand at 74 % at 5 after 300 steps of ICT, at this one at 80.
        """
        return (IMPORTANCE_RATE * self.slow_log_importance(ids).squeeze(-1)).exp()

    def fit_importance(self, weight_V: Tensor) -> None:
        """Sets how much each word counts; all above 0 (inverse document frequency is a good start)."""
        with torch.no_grad():
            self.slow_log_importance.weight.copy_(weight_V.log()[:, None] / IMPORTANCE_RATE)


def new_tower(trunk: BertConfig, config: EmbedderConfig) -> Tower:
    """A tower from random weights."""
    return (WordTower if config.pooling == "words" else TrunkTower)(trunk, config)


class Embedder(nn.Module):
    """Query tower and passage tower; one and the same object when shared."""

    def __init__(self, trunk: BertConfig, config: EmbedderConfig):
        super().__init__()
        self.trunk_config, self.config = trunk, config
        self.query = self.passage = new_tower(trunk, config)
        if not config.shared:
            self.untie()

    def score(
        self, queries: Tokens, passages: Tokens | Tensor, place_BK: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Vectors of queries [B, D] and passages [U, D], and inner products of each query with those at `place_BK` [B, K].

        Each distinct passage is embedded once, or comes as its vector [U, D].
        """
        query_BD = self.query(queries)
        passage_UD = passages if isinstance(passages, Tensor) else self.passage(passages)
        return query_BD, passage_UD, own_scores(query_BD, passage_UD[place_BK])

    def untie(self) -> None:
        """Gives the passages their own tower, equal to the queries' for now (fine-tuning moves only the queries')."""
        if self.passage is self.query:
            self.passage = new_tower(self.trunk_config, self.config).to(self.query.projection.weight.device)
            self.passage.load_state_dict(self.query.state_dict())


class MaskedReader(nn.Module):
    """p(y|z,x): a BERT with its masked-LM head, read at masked positions only; with a copy head where `copy` is set."""

    kept_rows: int = 0
    """See `keep_rows`."""

    def __init__(self, bert: MaskedBert, copy: bool = False):
        super().__init__()
        self.bert = bert
        self.copy_head = CopyHead(bert.config.hidden_size, bert.config.vocab_size) if copy else None

    @property
    def config(self) -> BertConfig:
        return self.bert.config

    def forward(self, tokens: Tokens, row_P: Tensor, position_P: Tensor) -> Tensor:
        """log p(word) for the whole vocabulary at the given (row, position) pairs -> [P, V]; [B, T, V] never exists."""
        logits_PV, copied = self._read(tokens, row_P, position_P)
        word_logp_PV = logits_PV.log_softmax(dim=-1)
        if copied is None:
            return word_logp_PV
        return mixed_vocabulary_logp(word_logp_PV, *copied, tokens.ids_BT[row_P])

    def target_logp(self, tokens: Tokens, row_P: Tensor, position_P: Tensor, target_P: Tensor) -> Tensor:
        """log p(target) at the given (row, position) pairs -> [P]."""
        if not (self.kept_rows and torch.is_grad_enabled()):
            return self._target_logp(tokens, row_P, position_P, target_P)
        logp_P = torch.zeros(len(row_P), device=row_P.device)
        for rows in torch.arange(len(tokens.ids_BT), device=row_P.device).split(self.kept_rows):
            of_P = torch.isin(row_P, rows).nonzero().squeeze(1)
            if len(of_P):
                part = tokens.rows(rows), row_P[of_P] - rows[0], position_P[of_P], target_P[of_P]
                logp_P = logp_P.index_put((of_P,), recomputed(self._target_logp, *part))
        return logp_P

    def _target_logp(self, tokens: Tokens, row_P: Tensor, position_P: Tensor, target_P: Tensor) -> Tensor:
        logits_PV, copied = self._read(tokens, row_P, position_P)
        word_logp_P = -F.cross_entropy(logits_PV, target_P, reduction="none")
        if copied is None:
            return word_logp_P
        return mixed_target_logp(word_logp_P, *copied, tokens.ids_BT[row_P], target_P)

    def _read(
        self, tokens: Tokens, row_P: Tensor, position_P: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """Logits of words [P, V] float32; and what the copy head says, where there is one: it looks at all states."""
        if self.copy_head is None:
            return self.bert.cls(states_at(self.bert.bert, tokens, row_P, position_P)).float(), None
        states_BTH = hidden_states(self.bert.bert, tokens)
        words_BTH = self.bert.bert.embeddings.word_embeddings(tokens.ids_BT)
        copied = self.copy_head(states_BTH, words_BTH, tokens, row_P, position_P)
        return self.bert.cls(states_BTH[row_P, position_P]).float(), copied

    def token_logp(self, joint: Tokens, position_BM: Tensor, target_BM: Tensor, mask_BM: Tensor) -> Tensor:
        """log p(y_m|z_k,x) of every masked token beside every candidate -> [B, K, M]; 0 where `mask_BM` is.

        `joint` holds each query beside each candidate, candidate fastest. Rows are read in chunks of similar length.
        """
        (queries, most), rows = position_BM.shape, len(joint.ids_BT)
        candidates = rows // queries
        logp_RM = torch.zeros(rows, most, device=joint.ids_BT.device)
        for chunk in joint.mask_BT.sum(dim=1).argsort(descending=True).split(ROWS_AT_ONCE):
            local_P, masked_P = mask_BM[chunk // candidates].nonzero(as_tuple=True)
            query_P = chunk[local_P] // candidates
            value_P = self.target_logp(
                joint.rows(chunk), local_P, position_BM[query_P, masked_P], target_BM[query_P, masked_P]
            )
            logp_RM = logp_RM.index_put((chunk[local_P], masked_P), value_P)
        return logp_RM.view(queries, candidates, most)

    def vocabulary_logp(self, joint: Tokens, position_BM: Tensor, mask_BM: Tensor) -> Tensor:
        """log p(word|z_k,x) at every masked token beside every candidate -> [P, K, V].

        P is in the order of `mask_BM`'s ones. For looking at predictions; training needs `token_logp` only.
        """
        candidates = len(joint.ids_BT) // len(position_BM)
        query_P, masked_P = mask_BM.nonzero(as_tuple=True)
        row_PK = query_P[:, None] * candidates + torch.arange(candidates, device=query_P.device)
        position_PK = position_BM[query_P, masked_P][:, None].expand_as(row_PK)
        return self(joint, row_PK.flatten(), position_PK.flatten()).view(*row_PK.shape, -1)


@dataclass(frozen=True)
class SpanConfig:
    """The head that scores spans; defaults are the released values."""

    head: Literal["pairs", "ends"] = "pairs"
    """"pairs": an MLP over a span's first and last state (ORQA). "ends": the logit of its start and that of its end, less
    both of [CLS], which stand for "no answer": BERT's question-answering head, as SQuAD 2.0 trains it."""
    max_width: int = 10
    """Longest answer in wordpieces."""
    hidden: int = 256
    """Width of the hidden layer of "pairs"."""
    norm_eps: float = 1e-3
    """Of its LayerNorm."""
    finds_none: bool = False
    """"No answer" has the score 0 beside the scores of the spans; the released reader always finds one."""

    def __post_init__(self) -> None:
        for name, value in (("max_width", self.max_width), ("hidden", self.hidden)):
            if not 1 <= value < 2**31:
                raise ValueError(f"{name} is {value}: it must be 1 or more, and fit 32 bits")
        if not 0 <= self.norm_eps < math.inf:
            raise ValueError(f"norm_eps is {self.norm_eps}: it must be 0 or more, and finite")


class SpanReader(nn.Module):
    """Scores every span of up to `max_width` wordpieces by its first and last state (ORQA eq. for S_read, or BERT's way)."""

    continues_V: Tensor
    """True at wordpieces that continue a word: no span begins with one or ends before one. All False: the released code."""

    def __init__(self, trunk: Bert, continues_V: Tensor | None = None, config: SpanConfig | None = None):
        super().__init__()
        self.trunk, self.config = trunk, config or SpanConfig()
        none_V = torch.zeros(trunk.config.vocab_size, dtype=torch.bool)
        self.register_buffer("continues_V", none_V if continues_V is None else continues_V)
        pairs = self.config.head == "pairs"
        width = self.config.hidden if pairs else 1
        self.ends = nn.Linear(trunk.config.hidden_size, 2 * width)
        self.norm = nn.LayerNorm(width, eps=self.config.norm_eps) if pairs else nn.Identity()
        self.score = nn.Linear(width, 1) if pairs else nn.Identity()
        for layer in (self.ends, self.score):
            if isinstance(layer, nn.Linear):
                nn.init.trunc_normal_(layer.weight, std=0.02, a=-0.04, b=0.04)
                nn.init.zeros_(layer.bias)

    def forward(self, tokens: Tokens, body_BT: Tensor) -> Tensor:
        """Score of the span of w+1 pieces that starts at t -> [B, W, T] float32, -inf unless it may be one in `body_BT`."""
        states_BTH = hidden_states(self.trunk, tokens)
        start_BTS, end_BTS = self.ends(states_BTH).chunk(2, dim=-1)
        if self.config.head == "ends":  # the score itself: not the difference of rounded numbers
            start_BTS, end_BTS = start_BTS.float(), end_BTS.float()
        length = tokens.ids_BT.shape[1]
        inner_BT = self.continues_V[tokens.ids_BT]
        first_BT, last_BT = body_BT & ~inner_BT, body_BT & ~F.pad(inner_BT[:, 1:], (0, 1))
        widths = []
        for width in range(min(self.config.max_width, length)):
            both = start_BTS[:, : length - width] + end_BTS[:, width:]
            if self.config.head == "pairs":
                score = self.score(self.norm(F.relu(both))).squeeze(-1).float()
            else:
                score = (both - start_BTS[:, :1] - end_BTS[:, :1]).squeeze(-1)
            inside = first_BT[:, : length - width] & last_BT[:, width:]
            widths.append(F.pad(score.masked_fill(~inside, -torch.inf), (0, width), value=-torch.inf))
        return torch.stack(widths, dim=1)

    def head(self) -> list[nn.Module]:
        """What scores spans by the trunk's states."""
        return [part for part in (self.ends, self.norm, self.score) if not isinstance(part, nn.Identity)]

    def beside(self, score_BK: Tensor) -> Tensor:
        """What the retrieval scores of the passages read add to the scores of their spans -> [B, K].

        A head of "pairs" was trained beside the scores themselves. One of "ends" compares spans with "no answer", passage by
        passage: log p(z|x) among the passages read leaves "no answer" at the score 0 for all of them together.
        """
        return score_BK if self.config.head == "pairs" else score_BK.log_softmax(dim=-1)


def body_mask(tokens: Tokens, sep_id: int) -> Tensor:
    """True at a joint input's passage tokens, its closing [SEP] excluded -> [B, T] bool."""
    return (tokens.segments_BT == 1) & (tokens.ids_BT != sep_id) & (tokens.mask_BT == 1)


def load_reader(name: str, alone: bool = True) -> MaskedReader:
    """The masked-LM reader of a BERT by folder, `package:` or hub name.

    A missing head starts as the identity, so that a state close to a word's embedding predicts that word. Files are compared
    with the checksums in the folder, unless it is not `alone`: a model has checksums of its own for all its files.

    Raises:
        InputError: no such encoder, not of the BERT family, or damaged files.
    """
    folder = Path(encoder_folder(name))
    if alone and name not in PACKAGED:  # those were compared when their folder was asked for
        check_folder(folder)
    reader = MaskedReader(load_bert(folder, name), copy=(folder / COPY_HEAD).is_file())
    if reader.copy_head is not None:
        try:
            reader.copy_head.load_state_dict(load_tensors(folder / COPY_HEAD))
        except (SafetensorError, OSError, RuntimeError) as error:
            raise InputError(
                f"{folder / COPY_HEAD} is damaged or of another version: {reason(error)}"
            ) from error
    return reader


def save_reader(reader: MaskedReader, folder: Path, compact: bool = False) -> None:
    """Writes a reader in Hugging Face layout, its copy head beside it; see `save_bert` for `compact`."""
    save_bert(reader.bert, folder, compact)
    if reader.copy_head is not None:
        save_tensors(reader.copy_head.state_dict(), folder / COPY_HEAD, compact=compact)


def new_reader(trunk: TrunkConfig, tokenizer: Tokenizer) -> MaskedReader:
    """A reader from random weights, for text that no published encoder knows."""
    return MaskedReader(
        MaskedBert(
            BertConfig(
                vocab_size=tokenizer.vocab_size,
                hidden_size=trunk.hidden,
                num_hidden_layers=trunk.layers,
                num_attention_heads=trunk.heads,
                intermediate_size=4 * trunk.hidden,
                max_position_embeddings=trunk.positions,
                pad_token_id=tokenizer.pad_id,
            )
        )
    )


def embedder_from(reader: MaskedReader, config: EmbedderConfig) -> Embedder:
    """An untrained embedder on a copy of the reader's trunk or words; its projection is random until `fit_projection`."""
    embedder = Embedder(reader.config, config)
    for tower in {embedder.query, embedder.passage}:
        tower.start_from(reader.bert.bert)
    return embedder


def load_pooler(embedder: Embedder, name: str) -> None:
    """Gives towers that pool [CLS] the pooler that a BERT was published with; without one theirs stays random."""
    weights = read_weights(Path(encoder_folder(name)), name)
    states = {k.split("pooler.dense.")[1]: v for k, v in weights.items() if "pooler.dense." in k}
    if states:
        for tower in {embedder.query, embedder.passage}:
            if isinstance(tower, TrunkTower) and tower.trunk.pooler is not None:
                tower.trunk.pooler.dense.load_state_dict({k: v.float() for k, v in states.items()})


def fit_projection(tower: Tower, pooled_NH: Tensor, whiten: bool) -> None:
    """Starts the projection at the principal components of the corpus' pooled states, with the mean removed.

    `whiten` gives every component unit variance: it helps a trunk whose states share a few dominant directions.
    """
    mean_H = pooled_NH.mean(dim=0)
    _, singular, components = torch.linalg.svd(pooled_NH - mean_H, full_matrices=False)
    # n passages fix at most n - 1 directions; what is measured in the others is rounding, and whitening would blow it up
    known = int((singular > 1e-4 * singular[0]).sum())
    kept_DH = components[: min(known, tower.config.dim)]
    if whiten:
        kept_DH = kept_DH / (singular[: len(kept_DH), None] / len(pooled_NH) ** 0.5)
    bias_D = -(kept_DH * mean_H).sum(dim=1)  # no product that autocast would round
    with torch.no_grad():
        for parameter, start in ((tower.projection.weight, kept_DH), (tower.projection.bias, bias_D)):
            parameter.zero_()
            parameter[: len(start)].copy_(start)


def set_dropout(module: nn.Module, probability: float) -> None:
    """Sets every dropout of a network; 0 suits runs of a few hundred steps (paper: 0.1)."""
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = probability


def keep_rows(module: nn.Module, rows: int) -> None:
    """Keeps the activations of so many rows at a time and computes them again for the backward pass; 0: keeps all.

    The gradient is the same but for rounding (gradient caching, Gao et al. 2021), so a batch of any size fits, for a forward
    pass more.
    """
    for part in module.modules():
        if isinstance(part, Tower | MaskedReader):
            part.kept_rows = rows


def recomputed(function: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """`function(*inputs)`, whose intermediate results are not kept for the backward pass but made again, draws included."""
    return cast(
        Tensor,
        checkpoint(function, *inputs, use_reentrant=False, context_fn=lambda: (undivided(), undivided())),
    )


@contextmanager
def evaluating(*modules: nn.Module) -> Iterator[None]:
    """Dropout off inside; afterwards each network is in the mode in which it came."""
    before = [module.training for module in modules]
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for module, training in zip(modules, before, strict=True):
            module.train(training)
