"""A graph of passages: a passage is connected with documents that it names, and with other passages of its own document.

Which documents a passage names depends on whether its links are known (`Passage.links`):

- Links known, as in PathRetriever: the passage names each document whose title it links to. Titles that occur in the text
  without a link are ignored. Readers of dumps replace the title of a redirect by that of the page behind it.
- Links unknown: the passage names each document whose title occurs in its text. A title occurs under three conditions: the text
  contains the words of the title, the first of these words begins with a capital letter or a digit, and the words are not part
  of a longer title. An explanation in brackets does not count as part of a title: "Mercury (planet)" is found by the word
  "Mercury".

GraphRetriever was published with relations from Wikidata, and with the entity linker TAGME. Here, named documents replace the
relations, and titles in the question replace the linked entities.

Axis letters: E edges, N passages, K some passages.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from realm.folders import make_once
from realm.progress import progress
from realm.search.bm25 import STOP_WORDS
from realm.store.knowledge_base import KnowledgeBase
from realm.systems.articles import Articles
from realm.systems.tfidf import tokens_of
from realm.text.corpus import Passage

LONGEST_TITLE = 8
"""Largest number of words of a title; longer titles are not searched for in texts."""
NONE, MENTIONS, MENTIONED, PARENT, CHILD = range(5)
"""Relation of a passage a to a passage b.

NONE: no relation. MENTIONS: a names the document of b. MENTIONED: b names the document of a. PARENT: both are in the same
document, and a is its first passage. CHILD: both are in the same document, and b is its first passage.
"""
RELATIONS = 5
FILE = "graph.json"
_EXPLANATION = re.compile(r"\s*\([^()]*\)\s*$")


class Titles:
    """Finds documents by title, in texts and in lists of linked pages."""

    def __init__(self, kb: KnowledgeBase, articles: Articles):
        titles = kb.titles
        # In reverse order, so that the first of several documents with the same title is kept.
        self._exact = dict(zip(reversed(titles), reversed(articles.document_N.tolist()), strict=True))
        self._document: dict[tuple[str, ...], int] = {}
        for document in range(articles.count):
            title = titles[articles.lead(document)]
            bare = _EXPLANATION.sub("", title)
            words = tuple(token.text.lower() for token in tokens_of(bare))
            if (
                not 0 < len(words) <= LONGEST_TITLE
                or len(bare) < 2
                or all(word in STOP_WORDS for word in words)
            ):
                continue
            # "Mercury" and "Mercury (planet)" have the same words; the title without an explanation is preferred, because it
            # probably has the most common meaning.
            if words not in self._document or bare == title:
                self._document[words] = document

    def named(self, passage: Passage) -> Iterator[int]:
        """Documents that a passage names: by its links if they are known, else by the titles in its text."""
        if passage.links is None:
            yield from self.find(passage.text)
        else:
            yield from (self._exact[title] for title in passage.links if title in self._exact)

    def find(self, text: str, any_case: bool = False) -> Iterator[int]:
        """Documents whose titles a text contains, in the order of the text. Of titles that begin at the same word, only the
        longest counts.

        With `any_case`, titles in lower case are found too, because questions are often written in lower case.
        """
        tokens = tokens_of(text)
        words = [token.text.lower() for token in tokens]
        place = 0
        while place < len(words):
            first, step = tokens[place].text[0], 1
            if any_case or first.isupper() or first.isdigit():
                for width in range(min(LONGEST_TITLE, len(words) - place), 0, -1):
                    document = self._document.get(tuple(words[place : place + width]))
                    if document is not None:
                        yield document
                        step = width
                        break
            place += step


@dataclass(frozen=True)
class PassageGraph:
    """For each passage, the documents that it names, except its own document."""

    articles: Articles
    titles: Titles
    first_N: np.ndarray
    """Position in `document_E` of the first edge of each passage; the last element is the number of edges: [N + 1]."""
    document_E: np.ndarray
    """Named document of each edge; edges are ordered by passage."""

    @classmethod
    def open(cls, kb: KnowledgeBase, system: Path) -> Self:
        """The graph of a knowledge base. The edges are stored in the folder SYSTEM.graph, beside the folder of the system."""
        articles, folder = Articles.of(kb), system.with_name(system.name + ".graph")
        titles = Titles(kb, articles)

        def make(aside: Path) -> None:
            first_N, document_E = edges_of(kb, articles, titles)
            np.save(aside / "first.npy", first_N)
            np.save(aside / "documents.npy", document_E)

        made_of = {"kb": kb.fingerprint, "documents": kb.documents_digest}
        made_of |= {"links": kb.links_digest} if kb.links_digest else {}
        make_once(folder, FILE, made_of, make)
        return cls(articles, titles, *(np.load(folder / f"{name}.npy") for name in ("first", "documents")))

    def named(self, passage: int) -> list[int]:
        """Documents that a passage names, in the order of the text, without repetitions."""
        return list(self.document_E[self.first_N[passage] : self.first_N[passage + 1]].tolist())

    def neighbours(self, passage: int) -> Iterator[int]:
        """The passages that are one edge away from a passage.

        These are the first passages of the documents that the passage names, followed by passages of its own document. If the
        passage is the first of its document, these are all other passages of the document; else only the first passage.
        """
        own = int(self.articles.document_N[passage])
        yield from (self.articles.lead(document) for document in self.named(passage))
        lead = self.articles.lead(own)
        yield from [lead] if passage != lead else self.articles.passages([own])[1:].tolist()

    def expand(self, seeds: Sequence[int], hops: int, most: int) -> list[int]:
        """The seeds, then all passages at most `hops` edges away from a seed, nearest first; cut after `most` passages."""
        found = dict.fromkeys(seeds)
        frontier = list(found)
        for _ in range(hops):
            reached = [one for passage in frontier for one in self.neighbours(passage)]
            frontier = [one for one in dict.fromkeys(reached) if one not in found]
            found.update(dict.fromkeys(frontier))
            if len(found) >= most:
                break
        return list(found)[:most]

    def relations(self, passages: Sequence[int]) -> np.ndarray:
        """The relation of each passage (row) to each other passage (column) -> [K, K].

        If several relations apply, the first of MENTIONS, MENTIONED, PARENT and CHILD is used.
        """
        document = [int(self.articles.document_N[passage]) for passage in passages]
        lead = [self.articles.lead(one) for one in document]
        named = [set(self.named(passage)) for passage in passages]
        relation_KK = np.full((len(passages), len(passages)), NONE, dtype=np.int64)
        for row, one in enumerate(passages):
            for column, other in enumerate(passages):
                if row == column:
                    continue
                if document[column] in named[row]:
                    relation_KK[row, column] = MENTIONS
                elif document[row] in named[column]:
                    relation_KK[row, column] = MENTIONED
                elif document[row] == document[column] and one == lead[row]:
                    relation_KK[row, column] = PARENT
                elif document[row] == document[column] and other == lead[column]:
                    relation_KK[row, column] = CHILD
        return relation_KK


def edges_of(kb: KnowledgeBase, articles: Articles, titles: Titles) -> tuple[np.ndarray, np.ndarray]:
    """`first_N` and `document_E` of a `PassageGraph`. Only one passage at a time is in memory. Shows a progress bar."""
    counts, documents = [], []
    for number, passage in enumerate(progress(kb, total=len(kb), description="graph", unit="passage")):
        own = int(articles.document_N[number])
        found = [one for one in dict.fromkeys(titles.named(passage)) if one != own]
        counts.append(len(found))
        documents.extend(found)
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]), np.array(documents, dtype=np.int64)
