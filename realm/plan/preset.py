"""Inputs of a plan: the corpus (of a knowledge base, or assumed), and the stages and networks of a preset."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from realm.errors import InputError
from realm.hub import encoder_folder
from realm.model.bert import BertConfig
from realm.model.bert_files import read_bert_config
from realm.model.embedder import EmbedderConfig
from realm.model.folder import load_model
from realm.model.manifest import is_model
from realm.settings import read_config, tables_of
from realm.store.knowledge_base import KnowledgeBase
from realm.store.settings import KnowledgeBaseConfig
from realm.train.finetune import FinetuneConfig
from realm.train.ict import IctConfig
from realm.train.mlm import MlmConfig
from realm.train.pretrain import PretrainConfig
from realm.train.run_config import RunConfig

PASSAGES = 13_353_718
"""Number of passages of the paper's Wikipedia."""
FILLED, TITLE, SENTENCE = 0.75, 4, 30
"""Assumptions without a knowledge base: mean length of a passage as a share of the longest passage; wordpieces of a title and
of a sentence."""


class Corpus(NamedTuple):
    """Size of a corpus: the number of passages, and mean lengths."""

    passages: int
    pieces: float
    """Mean wordpieces of a passage, with its title and special tokens."""
    title: float
    """Mean wordpieces of the title of a passage."""
    sentence: float
    """Mean wordpieces of a sentence."""

    @classmethod
    def assumed(cls, passages: int, passage_tokens: int) -> "Corpus":
        """A corpus of which only the number of passages is known; the mean lengths are assumed."""
        return cls(passages, FILLED * passage_tokens, TITLE, min(SENTENCE, FILLED * passage_tokens))

    @classmethod
    def of(cls, kb: KnowledgeBase) -> "Corpus":
        """The corpus of a knowledge base."""
        tokens = kb.tokens
        body, title = (float(np.mean(part.lengths)) for part in (tokens.body, tokens.title))
        return cls(len(kb), body + title + 3, title, body * len(kb) / max(1, len(tokens.sentences.values)))


class Preset(NamedTuple):
    """The training stages of a preset, and the sizes of the networks of the preset."""

    kb: KnowledgeBaseConfig
    stages: dict[str, RunConfig]
    encoder: BertConfig
    embedder: EmbedderConfig
    copy_head: bool
    query_tokens: int

    @classmethod
    def read(cls, name: str, changed: Mapping[str, Sequence[str]] | None = None) -> "Preset":
        """Reads a preset, or a file of settings. `changed` has settings of a table, as NAME=VALUE, that differ.

        Raises:
            InputError: there is no such preset or file, it has no stage with steps, or the encoder of the preset is not
                available.
        """
        changed = changed or {}
        kb = read_config(KnowledgeBaseConfig, name, "kb", changed.get("kb", ()))
        mlm = read_config(MlmConfig, name, "mlm", changed.get("mlm", ()))
        stages: dict[str, RunConfig] = {"mlm": mlm}
        classes: dict[str, type[RunConfig]] = {
            "ict": IctConfig, "pretrain": PretrainConfig, "finetune": FinetuneConfig,
        }  # fmt: skip
        stages |= {
            stage: read_config(made, name, stage, changed.get(stage, ())) for stage, made in classes.items()
        }
        there = tables_of(name) | changed.keys()
        planned = {stage: config for stage, config in stages.items() if stage in there and config.steps}
        if not planned:
            raise InputError(
                f"{name} has no stage to plan: give a preset, or a file with a table {', '.join(f'[{one}]' for one in stages)}"
            )
        if mlm.init is not None and is_model(mlm.init):
            model = load_model(mlm.init)
            given = mlm.embedder_start == "given"
            embedder = model.embedder.config if given else mlm.embedder
            copies = mlm.copy_head or model.reader.copy_head is not None
            return cls(kb, planned, model.reader.config, embedder, copies, mlm.query_tokens)
        return cls(kb, planned, _encoder(mlm), mlm.embedder, mlm.copy_head, mlm.query_tokens)


def _encoder(mlm: MlmConfig) -> BertConfig:
    """The sizes of the encoder that a preset starts from."""
    if mlm.init is None:
        size = mlm.encoder
        return BertConfig(
            hidden_size=size.hidden, num_hidden_layers=size.layers, num_attention_heads=size.heads,
            intermediate_size=4 * size.hidden, max_position_embeddings=size.positions,
        )  # fmt: skip
    if mlm.init == "bert-base-uncased":  # the default sizes are those of this encoder
        return BertConfig()
    return read_bert_config(Path(encoder_folder(mlm.init)), mlm.init)
