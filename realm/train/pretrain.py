"""REALM pre-training: trains a retriever and a reader from text alone (Guu et al. 2020, sections 3.1-3.4).

One step has these parts:

    sentence - salient span -> MaskedQuery - embed (no gradient) -> search -> two rules -> candidates
    candidates - read_inputs -> RetrievalBatch -> score_BK, token_logp_BKM -> marginal likelihood -> update
    (with `ict`: the loss of the inverse cloze task is added)
    every `refresh.every` steps: snapshot -> index build in another process -> new version, measured on the probe, then used
    after the last step: the index of the saved model is published in the knowledge base

docs/paper_map.md lists all differences from the paper; `configs/paper.toml` has the published values of the settings.

Axis letters: B queries, K candidates including the null passage, E entries of the loss (`Entries`), M masked tokens, D
embedding, R queries for which the reader computes a gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from realm import distributed
from realm.errors import InputError, at_least, check_shares
from realm.masking.candidates import (
    CandidateRule,
    Candidates,
    RetrievalBatch,
    choose_candidates,
    embed_queries,
    read_inputs,
)
from realm.masking.held_out import held_out
from realm.masking.masked_queries import MaskedQuery, Masking, MaskingRule, SpanIndex, draw_queries, holds
from realm.model.embedder import Embedder, freeze_input_embeddings, freeze_passage_encoder
from realm.model.folder import Model, load_model
from realm.model.losses import (
    in_batch_loss,
    marginal_loss,
    posterior,
    retrieval_utility,
    span_marginal,
    token_credit,
    with_unretrieved,
)
from realm.model.masked_reader import MaskedReader
from realm.model.modes import evaluating
from realm.qa.question_files import Question
from realm.search.bm25 import Bm25Index
from realm.search.exact import PassageIndex
from realm.search.stored_bm25 import load_or_build_bm25
from realm.store.knowledge_base import KnowledgeBase, PassageTokens
from realm.tokens.layouts import NULL_PASSAGE, Tokens
from realm.tokens.tokenizer import Tokenizer
from realm.train.health import GATE_LIMIT, HealthConfig, HealthWatch
from realm.train.ict import ClozeRule, cloze_vectors
from realm.train.loop import StartedFrom, TrainRun
from realm.train.refresh.cached_states import CachedPassageStates, cached_passage_states
from realm.train.refresh.refresher import IndexRefresher, RefreshConfig
from realm.train.run_config import RunConfig, generator

POSITIVE_GAIN, NEGATIVE_GAIN = 6.2, -1.6
"""Fixed gains in nats from passages with and without the masked span, for the control "entity"."""
UNRETRIEVED_GAP = 1.5
"""The log-likelihood of a span with an unretrieved passage is assumed to be the log-likelihood with the null passage minus this
number of nats."""
NO_SCORE = -1e9
"""Score of the null passage if `null_passage` is False; p(null|x) and the gradient are then 0."""


@dataclass(frozen=True)
class PretrainConfig(RunConfig):
    """Settings of `realm pretrain`. The defaults are the small-scale recipe; `configs/paper.toml` has the paper's values."""

    batch_size: int = 16
    """Masked sentences per step (paper: 512)."""
    candidates: int = 8
    """Passages per sentence, including the null passage (paper: 8)."""
    injected: int = 2
    """Injected positives: candidates that are chosen because they contain the masked span (paper: 0)."""
    bm25: int = 0
    """Candidates that BM25 finds for the words of the masked sentence (paper: 0)."""
    null_passage: bool = True
    """False: p(null|x) is 0. The null passage is still read, and counted in `candidates`, because metrics need the likelihood
    with the null passage."""
    exclude_own: bool = True
    """A passage that repeats the text of the query, such as the passage of the query itself, is not a candidate. False: such
    passages can be candidates."""
    retriever_rate: float = 3e-5
    """Peak learning rate of the embedder (paper: 3e-5)."""
    passage_encoder: Literal["trained", "frozen"] = "trained"
    """Encoder of the passage tower (paper: trained). "frozen": only the projection of the passage tower is trained, on cached
    passage states, so that an index costs one matrix product. Use "frozen" on a CPU, if the encoder can already retrieve."""
    states: str = ""
    """Folder that keeps the passage states of a frozen encoder for other runs with the same encoder and passages. "": the
    states are removed after the run."""
    input_embeddings: Literal["trained", "frozen"] = "trained"
    """Word, position and segment embeddings of the towers (paper: trained). "frozen": these embeddings are not trained, so that
    the embeddings of rare words do not change."""
    learning_rate: float = 1e-4
    """Peak learning rate of the reader (paper: 3e-5)."""
    normalise: Literal["index", "candidates"] = "index"
    """Passages over which p(z|x) is a softmax. "candidates": the candidates (paper). "index": all passages; for at most about
    100,000 passages."""
    marginal: Literal["span", "token"] = "span"
    """The likelihood is a sum over passages, for each whole span ("span", paper) or for each token ("token", released code)."""
    masking: Masking = "salient"
    """What is masked. "salient": a salient span (paper). The other values are for the paper's ablation. "token": random
    wordpieces. "bert": random wordpieces, some of which are replaced or not changed, as in BERT. "span": random spans."""
    mask_repeats: bool = True
    """Other occurrences of the masked span in the sentence are masked too (released code: no)."""
    titled: float = 0.0
    """Share of sentences that begin with the title of their passage (paper: 0); a title is similar to the subject of a
    question."""
    reader_gradient: Literal["all", "sampled", "none"] = "sampled"
    """Candidates through which the reader is trained. "all": all candidates (paper). "sampled": at most one candidate per
    query, which is drawn with a probability proportional to its credit p(z|x,y); without dropout the expected gradient is the
    same. "none": the reader is not trained."""
    signal: Literal["reader", "shuffled", "entity"] = "reader"
    """Likelihoods that train the retriever. "reader": those of the reader. Two controls: "shuffled" permutes the reader's
    likelihoods among the passages of a query; "entity" replaces them by fixed likelihoods for passages with and without the
    masked span, and does not use the reader."""
    ict: float = 0.0
    """Weight of the loss of the inverse cloze task, which is added to the loss of masked spans (paper: 0)."""
    ict_batch: int = 128
    """Sentences of the inverse cloze task per step."""
    ict_titled: float = 0.0
    """Share of the sentences of the inverse cloze task that begin with the title of their passage."""
    refresh: RefreshConfig = field(default_factory=RefreshConfig)
    """When and where the index is rebuilt."""
    health: HealthConfig = field(default_factory=HealthConfig)
    """Health checks of the run."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, ict=0, ict_batch=1, candidates=1, injected=0, bm25=0)
        check_shares(self, "titled", "ict_titled")
        if (chosen := self.injected + self.bm25) >= self.candidates:
            raise ValueError(
                f"injected + bm25 is {chosen}: one of {self.candidates} candidates is the null passage, so at most "
                f"{self.candidates - 1} can be injected or found by BM25"
            )
        if self.states and self.passage_encoder != "frozen":
            raise ValueError('states needs passage_encoder = "frozen"')


class PretrainedFrom(StartedFrom):
    """What pre-training saves with the model, in addition to the settings."""

    text: str
    """Fingerprint of the corpus X, from which the masked sentences are taken."""


def train(
    kb: KnowledgeBase,
    out: Path,
    config: PretrainConfig,
    init: str,
    text: KnowledgeBase | None = None,
    questions: list[Question] | None = None,
) -> Path:
    """Pre-trains the model folder `init` on the knowledge base Z -> `out`.

    `text` is the corpus X of the masked sentences; None: the corpus is Z. The recall on `questions` is logged for every index
    version; training does not use the questions.
    """
    model = load_model(init)
    kb.check_tokenizer(model.tokenizer, init)
    kb.agree_on_held_out(model.held_out, init)
    source = text or kb
    source.check_tokenizer(model.tokenizer, init)
    source.agree_on_held_out(kb.held_out, f"--kb {kb.folder}")
    knowledge, spans = kb.tokens, SpanIndex(kb.tokens)
    words = load_or_build_bm25(kb) if config.bm25 else None
    known = np.flatnonzero(~held_out(kb.ids, kb.config.held_out))
    # A held-out passage of Z is also held out if X contains the same passage.
    passages = np.flatnonzero(~held_out(source.ids, kb.config.held_out))
    if config.masking == "salient":
        passages = passages[source.tokens.span_starts.lengths[passages] > 0]
    if len(passages) == 0:
        raise _nothing_to_mask(source, config)
    if config.passage_encoder == "frozen":
        freeze_passage_encoder(model.embedder)
    if config.input_embeddings == "frozen":
        freeze_input_embeddings(model.embedder)
    masking = MaskingRule(
        model.tokenizer.mask_id, model.lengths.query - 2, config.masking, config.mask_repeats, config.titled,
        model.tokenizer.vocab_size,
    )  # fmt: skip
    candidates = CandidateRule(  # the null passage first, never the query's own text
        config.candidates,
        source.fingerprint == kb.fingerprint,
        config.injected,
        config.exclude_own,
        config.bm25,
    )
    rates = {model.embedder: config.retriever_rate, model.reader: config.learning_rate}
    names: PretrainedFrom = {"init": init, **kb.training_record, "text": source.fingerprint}
    with (
        TrainRun("pretrain", out, config, model, rates, names, shares=True) as run,
        IndexRefresher(kb, run.folder, config.refresh, config.precision, run.report) as refresher,
    ):
        frozen = config.passage_encoder == "frozen"
        states_folder = Path(config.states) if config.states else run.folder
        states = cached_passage_states(kb, model, states_folder, config.precision) if frozen else None
        # A reader that is not trained cannot improve, so the run ends at once if this reader does not pass the gate.
        limit = 0 if config.reader_gradient == "none" else GATE_LIMIT
        watch = HealthWatch(config.health, kb, spans, model, run, questions, limit)
        version = refresher.build_initial(model, run.step, run.state.get("index"), states)
        run.after_checkpoint = lambda: refresher.prune(run.checkpointed("index"))
        watch.start(version, needs_reader=config.signal != "entity")
        for step in run.steps():
            rng = generator(config.seed, step)
            # Each query has one masked span.
            queries = draw_queries(source.tokens, passages, config.batch_size, rng, masking)
            if not queries:
                raise _nothing_to_mask(source, config)
            queries = distributed.shard(queries)
            with run.autocast():
                search_BD = embed_queries(refresher.query_model(model, version), queries)
            bm25_BK = None if words is None else bm25_hits(words, queries, model.tokenizer, config.candidates)
            chosen = choose_candidates(
                queries, search_BD, version.index, knowledge, candidates, spans, bm25_BK
            )
            batch = read_inputs(queries, chosen.number_BK, knowledge, model.tokenizer, model.lengths).to(
                run.device
            )
            with run.autocast():
                query_BD, score_BK = score(model.embedder, batch, chosen, states, config.null_passage)
                logp_BKM = read(model.reader, batch, queries, chosen, knowledge, config)
                rest_B = unretrieved_logsumexp(query_BD, chosen, version.index, config)
                entries = loss_entries(score_BK, logp_BKM, batch.mask_BM, rest_B, rng, config)
                reader_loss = sampled_reader_loss(model.reader, batch, entries, config)
                ict_loss = warm_start_loss(model, knowledge, known, rng, config)
            if not watch.reader_ready:  # the retriever is not trained until the reader uses passages
                entries = entries._replace(score_BE=entries.score_BE.detach())
                ict_loss = ict_loss.detach()
            loss = marginal_loss(entries.score_BE, entries.logp_BEM, batch.mask_BM, config.marginal)
            loss = distributed.loss_weight(batch.mask_BM.sum()) * (loss + reader_loss) + config.ict * ict_loss
            seen = describe(score_BK, logp_BKM, batch) | {"ict_loss": ict_loss}
            run.update(loss, seen | refresher.metrics(version, step))
            if config.refresh.every and run.step % config.refresh.every == 0:
                run.check_finite()  # before these weights become an index
            if watch.reader_ready:
                refresher.request(model, run.step)  # starts a build if one is due
            # `poll` waits only for a build whose index must be used now (refresh.lag).
            version = watch.after_step(refresher.poll(run.step), version)
            run.state["index"] = refresher.state_dict(version)  # for resuming
        if version.step < run.step:
            built = refresher.build_final(model, run.step)  # the last weights are checked too
            version = watch.after_step(built, version)
        refresher.publish_final(model, run.step, version, out)  # into the knowledge base
        watch.say_untrained()
        return run.finish()


def _nothing_to_mask(source: KnowledgeBase, config: PretrainConfig) -> InputError:
    what = "passage with a salient span" if config.masking == "salient" else "sentence of four wordpieces"
    return InputError(
        f"{source.folder} has no {what} to mask in passages that are not held out: use more text, another tagger or another "
        "value of masking"
    )


def bm25_hits(
    words: Bm25Index, queries: Sequence[MaskedQuery], tokenizer: Tokenizer, count: int
) -> np.ndarray:
    """The best passages for the words of each query, without [MASK]; a few more than `count`, of which some repeat its text."""
    texts = [tokenizer.decode(query.ids.tolist()) for query in queries]
    return words.search(texts, count + 8).number_BK


def score(
    embedder: Embedder,
    batch: RetrievalBatch,
    chosen: Candidates,
    states: CachedPassageStates | None,
    null_passage: bool = True,
) -> tuple[Tensor, Tensor]:
    """Vectors of the queries [B, D], and scores of the candidates of each query [B, K].

    If `states` are given, passage vectors are computed from these cached states, without the layers of the passage tower.
    """
    passages: Tokens | Tensor = batch.passages
    if states is not None:
        passages = states.vectors(embedder.passage, np.unique(chosen.number_BK))
    query_BD, score_BK = embedder.score(batch.queries, passages, batch.place_BK)
    if not null_passage:
        score_BK = F.pad(score_BK[:, 1:], (1, 0), value=NO_SCORE)
    return query_BD, score_BK


def read(
    reader: MaskedReader,
    batch: RetrievalBatch,
    queries: list[MaskedQuery],
    chosen: Candidates,
    knowledge: PassageTokens,
    config: PretrainConfig,
) -> Tensor:
    """log p(y_m|z_k,x) -> [B, K, M]; with gradient only if `reader_gradient` is "all"."""
    if config.signal == "entity":
        return _entity_table(queries, chosen.number_BK, knowledge, batch.mask_BM)
    inputs = batch.joint, batch.position_BM, batch.target_BM, batch.mask_BM
    if config.reader_gradient == "all":
        return reader.token_logp(*inputs)
    with torch.no_grad(), evaluating(reader):
        return reader.token_logp(*inputs)


class Entries(NamedTuple):
    """The entries (terms) of the loss of each query: one entry per candidate, and with `normalise = "index"` one more entry for
    all unretrieved passages together."""

    score_BE: Tensor
    logp_BEM: Tensor
    """log p(y_m|z_e,x); with gradient in the reader only if `reader_gradient` is "all"."""
    read_BE: Tensor
    """Column of the candidate whose likelihood an entry has; -1 for the entry of the unretrieved passages, whose likelihood is
    assumed (`UNRETRIEVED_GAP`)."""


def unretrieved_logsumexp(
    query_BD: Tensor, chosen: Candidates, index: PassageIndex, config: PretrainConfig
) -> Tensor | None:
    """Log of the sum of exp(score) over all passages that are not candidates -> [B]; None with `normalise = "candidates"`."""
    if config.normalise == "candidates":
        return None
    return index.rest_logsumexp(query_BD, chosen.not_in_rest())


def loss_entries(
    score_BK: Tensor,
    logp_BKM: Tensor,
    mask_BM: Tensor,
    rest_B: Tensor | None,
    rng: np.random.Generator,
    config: PretrainConfig,
) -> Entries:
    """The entries of the loss; the marginal likelihood p(y|x) is a sum over the entries (REALM eq. 1).

    `rest_B` is the result of `unretrieved_logsumexp`.
    """
    read_BK = torch.arange(score_BK.shape[1], device=score_BK.device).expand_as(score_BK)
    if config.signal == "shuffled":
        read_BK = _shuffled(read_BK, rng)
        logp_BKM = logp_BKM.gather(1, read_BK[:, :, None].expand_as(logp_BKM))
    if rest_B is None:
        return Entries(score_BK, logp_BKM, read_BK)
    score_BE, logp_BEM = with_unretrieved(score_BK, logp_BKM, mask_BM, rest_B, UNRETRIEVED_GAP)
    return Entries(score_BE, logp_BEM, F.pad(read_BK, (0, 1), value=-1))


def sampled_reader_loss(
    reader: MaskedReader, batch: RetrievalBatch, entries: Entries, config: PretrainConfig
) -> Tensor:
    """A loss whose expected gradient in the reader is the gradient of the whole loss -> scalar.

    One entry is drawn for each query, and the candidate of this entry is read with gradient. If the entry of the unretrieved
    passages is drawn, nothing is read for this query, because the likelihood of this entry does not depend on the reader."""
    if config.reader_gradient != "sampled" or config.signal == "entity":
        return entries.score_BE.new_zeros(())
    credit_BEM, share_BE = draw_chances(entries, batch.mask_BM, config)
    # As in `torch.multinomial`, but with random numbers for the whole batch, so that the draws do not depend on the number of
    # ranks.
    chance = share_BE.new_empty(len(share_BE) * distributed.world_size(), share_BE.shape[1]).exponential_()
    drawn_B = (share_BE / distributed.shard(chance)).argmax(dim=1)
    return drawn_reader_loss(reader, batch, entries, credit_BEM, share_BE, drawn_B)


def draw_chances(entries: Entries, mask_BM: Tensor, config: PretrainConfig) -> tuple[Tensor, Tensor]:
    """Credit of each entry at each masked token [B, E, M], and the probability to draw each entry [B, E].

    The probability of an entry is the mean of its credit over the masked tokens.
    """
    credit_BEM = token_credit(entries.score_BE.detach(), entries.logp_BEM.detach(), mask_BM, config.marginal)
    return credit_BEM, credit_BEM.sum(dim=2) / mask_BM.sum(dim=1, keepdim=True)


def drawn_reader_loss(
    reader: MaskedReader,
    batch: RetrievalBatch,
    entries: Entries,
    credit_BEM: Tensor,
    share_BE: Tensor,
    drawn_B: Tensor,
) -> Tensor:
    """Weighted mean over the masked tokens of -log p(y_m|z,x) for the drawn entries -> scalar.

    The weight of a token is the credit of the drawn entry at this token, divided by the probability of the draw.
    """
    row_B = torch.arange(len(drawn_B), device=drawn_B.device)
    candidate_B = entries.read_BE[row_B, drawn_B]
    reads_B = candidate_B >= 0
    weight_BM = reads_B[:, None] * credit_BEM[row_B, drawn_B] / share_BE[row_B, drawn_B][:, None]
    reads_R = reads_B.nonzero().squeeze(1)
    if len(reads_R) == 0:
        reads_R = row_B[:1]  # with weight 0: the gradient of the reader is then 0 and not None
    candidates = len(batch.joint.ids_BT) // len(drawn_B)
    joint = batch.joint.rows(reads_R * candidates + candidate_B[reads_R].clamp_min(0))
    asked = batch.position_BM[reads_R], batch.target_BM[reads_R], batch.mask_BM[reads_R]
    logp_RM = reader.token_logp(joint, *asked)[:, 0]
    return -(weight_BM[reads_R] * logp_RM).sum() / batch.mask_BM.sum().clamp_min(1)


def warm_start_loss(
    model: Model,
    knowledge: PassageTokens,
    passages: np.ndarray,
    rng: np.random.Generator,
    config: PretrainConfig,
) -> Tensor:
    """Loss of the inverse cloze task -> scalar; 0 if its weight is 0."""
    if not config.ict:
        return torch.zeros((), device=model.device)
    rule = ClozeRule(config.ict_batch, titled=config.ict_titled)
    return in_batch_loss(*cloze_vectors(model, knowledge, passages, rule, rng))


@torch.no_grad()
def describe(score_BK: Tensor, logp_BKM: Tensor, batch: RetrievalBatch) -> dict[str, Tensor | float]:
    """Metrics of a step: retrieval utility in nats, p(null|x), log p(y|x), entropy of p(z|x), and the flip rate.

    Here p(z|x) is a softmax over the candidates, also with `normalise = "index"`. The flip rate is the share of queries for
    which the passage with the largest p(z|x,y) is not the passage with the largest p(z|x).
    """
    prior_BK = score_BK.log_softmax(dim=1)
    credit_BK = posterior(score_BK, logp_BKM, batch.mask_BM)
    return {
        "retrieval_utility": (
            distributed.loss_weight(batch.mask_BM.sum())
            * retrieval_utility(score_BK, logp_BKM, batch.mask_BM)
        ),
        "null_probability": prior_BK[:, 0].exp().mean(),
        "marginal_logp": span_marginal(score_BK, logp_BKM, batch.mask_BM).mean(),
        "entropy": -(prior_BK.exp() * prior_BK).sum(dim=1).mean(),
        "flip_rate": (prior_BK.argmax(dim=1) != credit_BK.argmax(dim=1)).float().mean(),
    }


def _shuffled(read_BK: Tensor, rng: np.random.Generator) -> Tensor:
    """For the control "shuffled": a random permutation of the candidates of each query; the null passage stays first."""
    order_BK = np.stack([np.concatenate([[0], 1 + rng.permutation(read_BK.shape[1] - 1)]) for _ in read_BK])
    return torch.from_numpy(order_BK).to(read_BK.device)


def _entity_table(
    queries: list[MaskedQuery], number_BK: np.ndarray, knowledge: PassageTokens, mask_BM: Tensor
) -> Tensor:
    """For the control "entity": fixed log-likelihoods for passages with and without the masked span -> [B, K, M]."""
    gain_BK = np.zeros(number_BK.shape, dtype=np.float32)
    for row, query in enumerate(queries):
        for column, number in enumerate(number_BK[row][1:], start=1):
            if number != NULL_PASSAGE:
                is_positive = holds(knowledge.body.row(number), query.targets)
                gain_BK[row, column] = POSITIVE_GAIN if is_positive else NEGATIVE_GAIN
    per_token_B1 = mask_BM / mask_BM.sum(dim=1, keepdim=True).clamp_min(1)
    null_logp = -POSITIVE_GAIN
    return (torch.from_numpy(gain_BK).to(mask_BM.device)[:, :, None] + null_logp) * per_token_B1[:, None, :]
