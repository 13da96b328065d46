"""Settings of a knowledge base: those of `realm kb build`, and how they are stored with the table of passages."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import lance

from realm.errors import InputError, at_least, check_shares
from realm.folders import TABLE_KEY
from realm.settings import config_from
from realm.text.corpus import PassagesConfig

FORMAT = 5
"""Format of the passages on disk, the only format that can be read."""
_DECISIVE = (
    "passage_tokens",
    "cut",
    "passage_overlap",
    "held_out",
    "tagger",
    "sources",
    "max_document_chars",
    "near_duplicates",
    "title_field",
    "text_field",
    "id_field",
)
"""Settings that determine which passages a build makes."""


@dataclass(frozen=True)
class KnowledgeBaseConfig(PassagesConfig):
    """Settings of `realm kb build`; saved in the knowledge base."""

    tokenizer: str = "package:realm-mini"
    """Tokenizer: that of a model or encoder, by folder or name; "" for a tokenizer that was trained on the documents, or whose
    name is unknown."""
    passage_tokens: int = 288
    """Longest passage in wordpieces, including title and three special tokens (paper: 288)."""
    held_out: float = 0.03
    """Share of held-out passages: no training query is cut from them, and probes use them."""
    sources: tuple[str, ...] = ()
    """Sources of the documents, as given to the command."""
    near_duplicates: float = 0.0
    """Smallest similarity to an earlier document, from 0 to 1, at which a document is left out as nearly equal; 0: all
    documents are kept (`realm.documents.near_duplicates`)."""
    commit_every: int = 8192
    """Largest number of passages per commit; they are held in memory, and a killed build repeats them."""

    @property
    def later_tagger(self) -> str:
        """Tagger of documents that are added later."""
        return self.tagger or "rules"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, passage_tokens=16, commit_every=1)
        if self.passage_overlap > self.passage_tokens // 2:
            raise ValueError(
                f"passage_overlap is {self.passage_overlap}: it must be at most half of passage_tokens, which is "
                f"{self.passage_tokens}"
            )
        if not 0 <= self.held_out < 1:
            raise ValueError(f"held_out is {self.held_out}: it must be 0 or more, and less than 1")
        check_shares(self, "near_duplicates")


class SettingsJson(TypedDict):
    """`Settings` on disk."""

    format: int
    tokenizer: str
    config: dict[str, Any]
    """Fields of `KnowledgeBaseConfig`."""


class Settings(NamedTuple):
    """Settings of a knowledge base, stored in the schema metadata of the table of passages."""

    config: KnowledgeBaseConfig
    tokenizer: str
    """Fingerprint of the tokenizer."""

    def to_json(self) -> str:
        saved: SettingsJson = {
            "format": FORMAT,
            "tokenizer": self.tokenizer,
            "config": dataclasses.asdict(self.config),
        }
        return json.dumps(saved)

    @classmethod
    def of(cls, table: lance.LanceDataset, folder: Path) -> "Settings":
        """Reads the settings of a table.

        Raises:
            InputError: the table has no settings, or an unknown format.
        """
        try:
            saved = json.loads(table.schema.metadata[TABLE_KEY])
            known = saved["format"], saved["tokenizer"], saved["config"]
        except (TypeError, KeyError, ValueError):
            raise InputError(
                f"{folder} is not a knowledge base: the table of passages has no settings"
            ) from None
        if known[0] != FORMAT:
            raise InputError(
                f"{folder} has format {known[0]}, but this version of realm reads only format {FORMAT}: build the knowledge "
                "base again"
            )
        return cls(config_from(KnowledgeBaseConfig, known[2], str(folder)), known[1])

    def same_result(self, other: "Settings") -> bool:
        """Whether a build from the same documents makes the same knowledge base with both settings."""
        mine, others = (
            (s.tokenizer, *(getattr(s.config, name) for name in _DECISIVE)) for s in (self, other)
        )
        return mine == others
