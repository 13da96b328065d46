"""A corpus of twenty towns, and a tokenizer and a tagger small enough to read."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models, normalizers, pre_tokenizers

from realm.store.knowledge_base import KnowledgeBase, KnowledgeBaseConfig, build
from realm.text.corpus import Annotations, Document, Link, Span
from realm.tokens.tokenizer import Tokenizer

KNOWN = "the is in town it has inns one two capital ruritania ##is ##ania"
CONFIG = KnowledgeBaseConfig(passage_tokens=24, commit_every=4)


def tiny_tokenizer(*more: str) -> Tokenizer:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    characters = [chr(c) for c in range(33, 127) if not chr(c).isupper()]
    words = [*special, *characters, *(f"##{c}" for c in characters), *KNOWN.split(), *more]
    tokenizer = FastTokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return Tokenizer(tokenizer)


class TinyTagger:
    """Sentences end with a full stop, capitalised words are names."""

    name = "tiny"

    def __init__(self, before: Callable[[int], None] = lambda count: None):
        self.read: list[str] = []
        self._before = before

    def annotate(self, texts: Iterable[str]) -> Iterator[Annotations]:
        for text in texts:
            self._before(len(self.read))
            self.read.append(text)
            sentences = tuple(match.span() for match in re.finditer(r"[^.\s][^.]*\.?", text))
            spans = tuple(Span(*match.span(), "NAME") for match in re.finditer(r"[A-Z]\w+", text))
            yield Annotations(sentences, spans)


TOKENIZER = tiny_tokenizer()
DOCUMENTS = [
    Document(
        f"Town {i}",
        f"Town {i} is in Ruritania. " + " ".join(f"It has {n} inns." for n in range(i % 5)),
        f"d{i}",
    )
    for i in range(20)
]


def make(
    folder: Path, documents: Iterable[Document] = DOCUMENTS, config: KnowledgeBaseConfig = CONFIG
) -> KnowledgeBase:
    build(folder, documents, config, TOKENIZER, TinyTagger())
    return KnowledgeBase.open(folder)


LINKED = [
    Document(
        "Linked", "It has inns in Town 3.", "l", (Link(15, "Town 3"), Link(15, "Inn"), Link(15, "Town 3"))
    ),
    Document("Alone", "It has two inns.", "a", ()),
    DOCUMENTS[5],
]


def holding_out(kb: KnowledgeBase, share: float) -> KnowledgeBase:
    """The knowledge base as if it had been built with another share held out."""
    again = KnowledgeBase.open(kb.folder)
    again.config = replace(again.config, held_out=share)
    return again


def content(kb: KnowledgeBase) -> list[tuple[str, str]]:
    return [(passage.document_id, passage.text) for passage in kb]
