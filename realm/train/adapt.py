"""Adapts a retriever to a corpus within minutes, by REALM's loss with likelihoods that the reader computes only once.

`realm pretrain` reads every candidate in every step, and trains the reader and both towers. Differences of `realm adapt`:

- A masked sentence is *judged* once: the reader computes the gain from a few passages, log p(y|z,x) - log p(y|null,x). The
  reader needs nearly all of the time.
- Only the projection of the query tower is trained, on cached states of the sentences.
- Passages without the masked span count as unretrieved.
- Passage vectors do not change, so the adapted model uses the index of the start model.

`train(kb, out, config, init)` writes the model folder `out` within about `config.minutes`. The knowledge base must have the
index of the start model `init`. Each of the `config.rounds` rounds has three parts:

1. draw    masked sentences are drawn from passages that are not held out, and embedded; half of the sentences begin with the
           title of their passage
2. judge   the reader reads each sentence with the null passage, and with the best passages that contain the masked span; the
           gains are saved in OUT.training/judged-*.parquet. When the reader has used its share of the time, the remaining
           sentences of the round are not read, and every passage that contains the masked span gets the same fixed gain
3. train   optimizer steps on the sentences that were judged so far; p(z|x) is a softmax over the whole index

The projection at the end of a round selects the passages that are read in the next round. A killed run resumes from its last
checkpoint, and uses the judged sentences that are already saved. docs/recipe.md has measurements.

Axis letters: B sentences, N passages including the null passage, H hidden, D embedding, K passages read for a sentence,
P passages read for all sentences, M masked tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from realm.errors import InputError, at_least
from realm.files import new_file
from realm.index.versions import complete_index
from realm.masking.candidates import CandidateRule, choose_candidates, read_inputs
from realm.masking.held_out import held_out
from realm.masking.masked_queries import MaskedQuery, MaskingRule, SpanIndex, draw_queries, holds
from realm.model.folder import Model, load_model
from realm.model.losses import index_marginal_loss
from realm.model.modes import evaluating
from realm.model.scores import scores
from realm.progress import progress
from realm.search.exact import MipsIndex
from realm.store.knowledge_base import KnowledgeBase
from realm.tokens.layouts import NULL_PASSAGE, query_inputs
from realm.train.loop import StartedFrom, TrainRun
from realm.train.pretrain import POSITIVE_GAIN, UNRETRIEVED_GAP
from realm.train.run_config import RunConfig, generator

JUDGED_AT_ONCE = 16
"""Sentences that are judged as one batch; the time is checked between two batches."""
READING = 0.75
"""Share of the time limit in which the reader may read; the rest is for drawing sentences and for training."""
TRIES = 20
"""Largest number of drawn sentences per judged sentence. A sentence can be judged only if another passage contains its masked
span; in most corpora this is so for about half of the sentences."""
JUDGED_TYPES = {
    "state_H": pa.list_(pa.float32()),
    "number_K": pa.list_(pa.int64()),
    "gain_K": pa.list_(pa.float32()),
    "excluded": pa.list_(pa.int64()),
    "by_reader": pa.bool_(),
}
"""Column types of the files judged-*.parquet."""


TITLED = 0.5
"""Share of sentences that begin with the title of their passage; the title is similar to the subject of a question."""
READ = 2
"""Largest number of passages that the reader reads with a sentence, not counting the null passage."""


@dataclass(frozen=True)
class AdaptConfig(RunConfig):
    """Settings of `realm adapt`."""

    minutes: float = 10.0
    """Time limit in minutes for reading and training. If the limit is reached before the last step, the model at this time is
    the result."""
    steps: int = 300
    """Largest number of optimizer steps. With the defaults each judged sentence is used about five times; using few sentences
    many times makes the retriever worse."""
    batch_size: int = 64
    """Judged sentences per step. A *judged* sentence is a masked sentence for which the gains from passages are known."""
    warmup: int | None = 10
    """Steps of linear warm-up."""
    learning_rate: float = 3e-4
    """Peak learning rate of the projection of the query tower."""
    rounds: int = 10
    """Rounds of judging, evenly distributed over the steps. In each round, the reader reads the passages that the current
    projection ranks first."""
    sentences: int = 400
    """Masked sentences that are judged in each round."""
    signal: Literal["reader", "entity"] = "reader"
    """Gain from passages that contain the masked span. "reader": the gain of the reader for as many sentences as the reader can
    read in three quarters of the time limit, and a fixed gain for all other sentences. "entity", a control: a fixed gain for
    all sentences."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, rounds=1, sentences=1)
        if not self.minutes > 0:
            raise ValueError(f"minutes is {self.minutes:g}: it must be above 0")


class Judged(NamedTuple):
    """A masked sentence, and the gains from passages that contain the masked span."""

    state_H: np.ndarray
    """Pooled state of the sentence in the query tower, from which the projection computes the vector of the sentence."""
    number_K: np.ndarray
    """Numbers of the passages that contain the masked span."""
    gain_K: np.ndarray
    """Gain from each of these passages: log p(y|z,x) - log p(y|null,x) of the whole span."""
    excluded: np.ndarray
    """Passages that are not candidates: the passage of the sentence, and the hits that repeat the text of the sentence."""
    by_reader: bool
    """Whether the reader computed the gains; otherwise all gains have the same fixed value."""


def train(kb: KnowledgeBase, out: Path, config: AdaptConfig, init: str) -> Path:
    """Adapts the query tower of the model `init` to a knowledge base that has the index of `init` -> `out`."""
    model = load_model(init)
    kb.check_tokenizer(model.tokenizer, init)
    kb.agree_on_held_out(model.held_out, init)
    vectors_ND = complete_index(kb, model, init).index.rows(np.arange(len(kb)))
    model.embedder.untie()
    tower = model.embedder.query
    names: StartedFrom = {"init": init, **kb.training_record}
    with TrainRun("adapt", out, config, model, {tower.projection: config.learning_rate}, names) as run:
        judge = Judge(kb, model, vectors_ND, run, config)
        passage_ND = torch.cat([vectors_ND, model.null_vector().cpu()]).to(run.device)
        judged: list[Judged] = []
        steps_made = config.steps
        for step in run.steps():
            while judge.rounds <= step * config.rounds // config.steps and not judge.over:
                judged += judge.next_round()
            if judge.over or not judged:
                steps_made = step
                break
            drawn = generator(config.seed, step).integers(len(judged), size=config.batch_size)
            part = [judged[number] for number in drawn]
            state_BH = torch.from_numpy(np.stack([one.state_H for one in part])).to(run.device)
            score_BN = scores(tower.project(state_BH), passage_ND)
            loss = index_marginal_loss(score_BN, gain_table(part, len(kb)).to(run.device))
            null = score_BN.detach().softmax(dim=1)[:, -1].mean()
            run.update(loss, {"retrieval_utility": -loss, "null_probability": null})
        run.report(
            f"{steps_made:,} of {config.steps:,} steps, limit {config.minutes:g} min; sentences that the reader judged: "
            f"{sum(one.by_reader for one in judged):,} of {len(judged):,}"
        )
        return run.finish()


class Judge:
    """Judges masked sentences, one round at a time. Rounds that an interrupted run has saved are read from disk."""

    def __init__(
        self, kb: KnowledgeBase, model: Model, vectors_ND: Tensor, run: TrainRun, config: AdaptConfig
    ):
        self.rounds = 0
        """Number of finished rounds."""
        self._kb, self._model, self._run, self._config = kb, model, run, config
        self._index, self._spans = MipsIndex(vectors_ND.half(), run.device), SpanIndex(kb.tokens)
        passages = np.flatnonzero(~held_out(kb.ids, kb.config.held_out))
        self._passages = passages[kb.tokens.span_starts.lengths[passages] > 0]

    @property
    def over(self) -> bool:
        """Whether the time limit is reached."""
        return self._run.seconds() > 60 * self._config.minutes

    @property
    def _has_read(self) -> bool:
        """Whether the reader has used the time of this round and of all earlier rounds."""
        share = (self.rounds + 1) / self._config.rounds
        return self._run.seconds() > 60 * self._config.minutes * READING * share

    def next_round(self) -> list[Judged]:
        """The judged sentences of the next round; fewer than `sentences` if the time limit is reached, or if too few of the
        drawn sentences can be judged.

        Raises:
            InputError: none of the drawn sentences can be judged, because no other passage contains the masked span.
        """
        file = self._run.folder / f"judged-{self.rounds:04d}.parquet"
        if not file.exists():
            judged = self._judge_round()
            if not judged and not self.over:
                raise InputError(
                    f"{self._kb.folder} has no salient span that two passages contain, so the model cannot be adapted: "
                    "use another tagger, or more text"
                )
            write_judged(judged, file)
        self.rounds += 1
        return read_judged(file)

    def _judge_round(self) -> list[Judged]:
        config, model = self._config, self._model
        rule = MaskingRule(model.tokenizer.mask_id, model.lengths.query - 2, repeats=True, titled=TITLED)
        judged: list[Judged] = []
        with progress(total=config.sentences, description="judge", unit="sentence", leave=False) as bar:
            for batch in range(TRIES * -(-config.sentences // JUDGED_AT_ONCE)):
                if len(judged) >= config.sentences or self.over or len(self._passages) == 0:
                    break
                rng = generator(config.seed, config.steps + self.rounds, batch)
                queries = draw_queries(self._kb.tokens, self._passages, JUDGED_AT_ONCE, rng, rule)
                found = self._judge(queries)
                bar.update(min(len(found), config.sentences - len(judged)))
                judged += found
                # No checkpoint is saved here, because repeating the steps since the last checkpoint takes only seconds.
                if self._run.stop_requested:
                    raise KeyboardInterrupt
        return judged[: config.sentences]

    def _judge(self, queries: list[MaskedQuery]) -> list[Judged]:
        """Judges the queries whose masked span is contained in another passage; leaves out all other queries."""
        config, tokens = self._config, self._kb.tokens
        by_reader = config.signal == "reader" and not self._has_read
        state_BH = self._states(queries)
        with torch.no_grad():
            query_BD = self._model.embedder.query.project(state_BH)
        rule = CandidateRule(READ + 1, same_corpus=True, injected=READ)
        chosen = choose_candidates(queries, query_BD, self._index, tokens, rule, self._spans)
        reads_BK = np.array(
            [
                [number == NULL_PASSAGE or holds(tokens.body.row(number), query.targets) for number in row]
                for query, row in zip(queries, chosen.number_BK, strict=True)
            ]
        )
        read_BK = reads_BK & (chosen.number_BK != NULL_PASSAGE)
        helped = np.flatnonzero(read_BK.any(axis=1))
        if len(helped) == 0:
            return []
        if by_reader:
            gain_BK = self._gains(
                [queries[row] for row in helped], chosen.number_BK[helped], reads_BK[helped]
            )
        else:
            gain_BK = np.full((len(helped), READ + 1), POSITIVE_GAIN, dtype=np.float32)
        return [
            Judged(
                state_H,
                chosen.number_BK[row][read_BK[row]],
                gain_K[read_BK[row]],
                chosen.excluded[row],
                by_reader,
            )
            for row, state_H, gain_K in zip(helped, state_BH.cpu().numpy()[helped], gain_BK, strict=True)
        ]

    @torch.no_grad()
    def _states(self, queries: list[MaskedQuery]) -> Tensor:
        """Pooled states of the query tower -> [B, H] float32."""
        inputs = query_inputs([query.ids for query in queries], self._model.tokenizer, self._model.lengths)
        with evaluating(self._model.embedder.query), self._run.autocast():
            return self._model.embedder.query.pooled(inputs.to(self._run.device)).float()

    @torch.no_grad()
    def _gains(self, queries: list[MaskedQuery], number_BK: np.ndarray, reads_BK: np.ndarray) -> np.ndarray:
        """Gains, log p(y|z,x) - log p(y|null,x) per span -> [B, K]. Column 0 is the null passage.

        Only the candidates for which `reads_BK` is True are read. The values of all other candidates have no meaning.
        """
        model, (row_P, column_P) = self._model, torch.from_numpy(reads_BK).to(self._run.device).nonzero().T
        batch = read_inputs(queries, number_BK, self._kb.tokens, model.tokenizer, model.lengths).to(
            self._run.device
        )
        joint = batch.joint.rows(row_P * number_BK.shape[1] + column_P)
        asked = batch.position_BM[row_P], batch.target_BM[row_P], batch.mask_BM[row_P]
        with evaluating(model.reader), self._run.autocast():
            logp_PM = model.reader.token_logp(joint, *asked)[:, 0]  # 0 after the end of a span
        logp_BK = torch.zeros(number_BK.shape, device=joint.ids_BT.device)
        logp_BK[row_P, column_P] = logp_PM.sum(dim=1)
        return (logp_BK - logp_BK[:, :1]).cpu().numpy()


def gain_table(judged: Sequence[Judged], passages: int) -> Tensor:
    """Gain from every passage -> [B, N]; -inf for excluded passages. The last column is the null passage, whose gain is 0.

    The gain from passages that were not read is -`UNRETRIEVED_GAP`.
    """
    gain_BN = torch.full((len(judged), passages + 1), -UNRETRIEVED_GAP)
    gain_BN[:, -1] = 0.0
    for gain_N, one in zip(gain_BN, judged, strict=True):
        gain_N[torch.from_numpy(one.number_K)] = torch.from_numpy(one.gain_K)
        gain_N[torch.from_numpy(one.excluded)] = -torch.inf
    return gain_BN


def write_judged(judged: Sequence[Judged], file: Path) -> None:
    """Writes the judged sentences of a round. The file appears only when it is complete."""
    columns = {name: [getattr(one, name) for one in judged] for name in Judged._fields}
    table = pa.table({name: pa.array(rows, JUDGED_TYPES[name]) for name, rows in columns.items()})
    with new_file(file) as aside:
        pq.write_table(table, aside)


def read_judged(file: Path) -> list[Judged]:
    """The judged sentences in a file that `write_judged` wrote."""
    columns = [pq.read_table(file)[name] for name in Judged._fields]
    return [
        Judged(
            np.array(state.values),
            np.array(number.values),
            np.array(gain.values),
            np.array(excluded.values),
            by_reader.as_py(),
        )
        for state, number, gain, excluded, by_reader in zip(*columns, strict=True)
    ]
