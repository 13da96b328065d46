"""`realm fill`: the paper's worked example. A sentence with [MASK] in, predictions out, and what each passage did for them.

Letters: K candidates with the null one, P masked tokens, V vocabulary.
"""

from typing import Any, NamedTuple

import numpy as np
import torch

from realm.config import InputError
from realm.model.device import autocast
from realm.model.encoders import evaluating
from realm.model.folder import Model
from realm.qa.answers import Evidence
from realm.qa.pipeline import AnswerConfig, open_pair
from realm.retrieval.candidates import read_inputs
from realm.retrieval.index import IndexVersion, load_index
from realm.retrieval.knowledge_base import KnowledgeBase
from realm.retrieval.masked_queries import MaskedQuery
from realm.text.inputs import NULL_PASSAGE, query_inputs

CANDIDATES = 8
"""The null passage and seven retrieved ones, as in pre-training."""
PREDICTIONS = 5


class Prediction(NamedTuple):
    """A word for one mask; `probability` is p(y|x), marginalised over the passages."""

    text: str
    probability: float


class PassageEffect(NamedTuple):
    """What one passage did: `likelihood` is p(y|z,x) of the predicted words, `utility` its gain over null in nats."""

    evidence: Evidence
    likelihood: float
    utility: float

    def to_json(self) -> dict[str, Any]:
        return self.evidence.to_json() | {"likelihood": self.likelihood, "utility": self.utility}


class Filled(NamedTuple):
    """Predictions per [MASK], the null passage's share, and the passages in order of p(z|x)."""

    sentence: str
    masks: list[list[Prediction]]
    null_probability: float
    null_likelihood: float
    passages: list[PassageEffect]

    def to_json(self) -> dict[str, Any]:
        return {
            "sentence": self.sentence,
            "masks": [[p._asdict() for p in predictions] for predictions in self.masks],
            "null": {"probability": self.null_probability, "likelihood": self.null_likelihood},
            "passages": [passage.to_json() for passage in self.passages],
        }

    def lines(self) -> list[str]:
        lines = [
            f"[MASK] {number}: " + ", ".join(f"{p.text} {p.probability:.2f}" for p in predictions)
            for number, predictions in enumerate(self.masks, start=1)
        ]
        lines.append(
            f"without a passage: p(z|x) {self.null_probability:.2f}, p(y|z,x) {self.null_likelihood:.3f}"
        )
        for effect in self.passages:
            lines.append(
                f"{effect.utility:+6.2f} nats  p(z|x) {effect.evidence.probability:.2f}, p(y|z,x) {effect.likelihood:.3f}  "
                f"{effect.evidence.passage.title}: {' '.join(effect.evidence.passage.text.split())[:90]}"
            )
        return lines


class Filler:
    """A model and a knowledge base, ready for masked sentences."""

    def __init__(self, kb: KnowledgeBase, model: Model, version: IndexVersion, config: AnswerConfig):
        self.kb, self.model, self.version, self.config = kb, model, version, config

    @classmethod
    def load(cls, kb: str, model: str, config: AnswerConfig) -> "Filler":
        opened, loaded = open_pair(kb, model, config.device)
        return cls(opened, loaded, load_index(opened, loaded, model, config.mapped_index), config)

    @torch.no_grad()
    def fill(self, sentence: str) -> Filled:
        """Raises InputError where the sentence has no [MASK], or one beyond the model's query length."""
        model, query = self.model, self._query(sentence)
        inputs = query_inputs([query.ids], model.tokenizer, model.lengths).to(model.device)
        with evaluating(model.embedder, model.reader), autocast(model.device, self.config.precision):
            hits = self.version.index.search(model.embedder.query(inputs), CANDIDATES - 1)
            numbers = hits.number_BK[0].cpu().numpy()
            places = np.arange(NULL_PASSAGE, len(numbers))[None]  # of the null passage, then of the hits
            batch = read_inputs(
                [query], places, self.kb.tokens_of(numbers), model.tokenizer, model.lengths
            ).to(model.device)
            _, _, score_BK = model.embedder.score(batch.queries, batch.passages, batch.place_BK)
            logp_PKV = model.reader.vocabulary_logp(batch.joint, batch.position_BM, batch.mask_BM)
        prior_K = score_BK[0].log_softmax(dim=0)
        marginal_PV = (prior_K[None, :, None] + logp_PKV).logsumexp(dim=1)
        top = marginal_PV.topk(PREDICTIONS, dim=1)
        best_P = top.indices[:, 0]
        likelihood_K = logp_PKV[torch.arange(len(best_P)), :, best_P].sum(dim=0)
        passages = [
            PassageEffect(
                Evidence(passage, rank, float(prior_K[rank].exp())),
                float(likelihood_K[rank].exp()),
                float(likelihood_K[rank] - likelihood_K[0]),
            )
            for rank, passage in enumerate(self.kb.passages(numbers), start=1)
        ]
        masks = [
            [
                Prediction(word, float(logp.exp()))
                for word, logp in zip(model.tokenizer.tokens(ids), values, strict=True)
            ]
            for ids, values in zip(top.indices.tolist(), top.values, strict=True)
        ]
        return Filled(sentence, masks, float(prior_K[0].exp()), float(likelihood_K[0].exp()), passages)

    def _query(self, sentence: str) -> MaskedQuery:
        ids = np.array(self.model.tokenizer.encode_masked(sentence), dtype=np.int64)
        positions, most = np.flatnonzero(ids == self.model.tokenizer.mask_id), self.model.lengths.query - 2
        if len(positions) == 0:
            raise InputError(
                'the sentence has no [MASK]: write one, as in "The [MASK] is the currency of the UK."'
            )
        if positions[-1] >= most:
            raise InputError(
                f"the last [MASK] is wordpiece {positions[-1] + 1}, the model reads the first {most}: shorten the sentence"
            )
        ids = ids[:most]
        return MaskedQuery(NULL_PASSAGE, ids, ids, positions, ids[positions])
