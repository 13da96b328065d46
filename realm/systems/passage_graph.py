"""A graph of passages. Its edges are the documents that a passage names, and the passages of one document.

If the links of a passage are known (`Passage.links`), the passage names the documents to whose titles the passage links, as in
PathRetriever. Titles without a link are then ignored. A link to a redirect has the title of the redirect, and so names no
document.

If the links of a passage are unknown, the passage names the documents whose titles its text contains. A text contains a title
if the text contains the words of the title, the first word begins with a capital letter or a digit, and these words are not
part of a longer title. An explanation in brackets, as in "Mercury (planet)", does not belong to the title.

Named documents replace the relations of Wikidata in GraphRetriever. Titles in questions replace TAGME.

Axis letters: E edges, N passages.
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
"""Largest number of words of a title that is searched in passages."""
NONE, MENTIONS, MENTIONED, PARENT, CHILD = range(5)
"""Relation of a passage a to a passage b. NONE: no relation. MENTIONS: a names the document of b. MENTIONED: b names the
document of a. PARENT: a is the first passage of the document of b. CHILD: b is the first passage of the document of a."""
RELATIONS = 5
FILE = "graph.json"
_EXPLANATION = re.compile(r"\s*\([^()]*\)\s*$")


class Titles:
    """Finds documents by title: titles in texts, and titles of linked pages."""

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
            # If several documents have the same title, a title without an explanation is probably the most common meaning.
            if words not in self._document or bare == title:
                self._document[words] = document

    def named(self, passage: Passage) -> Iterator[int]:
        """Documents that a passage names: by links if the links of the passage are known, else by titles in the text."""
        if passage.links is None:
            yield from self.find(passage.text)
        else:
            yield from (self._exact[title] for title in passage.links if title in self._exact)

    def find(self, text: str, any_case: bool = False) -> Iterator[int]:
        """Documents that a text names, in the order of the text. At each place, the longest title counts.

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
    """The documents that each passage names, other than the document of the passage."""

    articles: Articles
    titles: Titles
    first_N: np.ndarray
    """Position in `document_E` of the first edge of each passage; the last element is the number of edges: [N + 1]."""
    document_E: np.ndarray

    @classmethod
    def open(cls, kb: KnowledgeBase, system: Path) -> Self:
        """The graph of a knowledge base. The edges are stored in the folder SYSTEM.graph, beside the folder of the system."""
        articles, folder = Articles.of(kb), system.with_name(system.name + ".graph")
        titles = Titles(kb, articles)

        def make(aside: Path) -> None:
            first_N, document_E = edges_of(kb, articles, titles)
            np.save(aside / "first.npy", first_N)
            np.save(aside / "documents.npy", document_E)

        made_of = {"kb": kb.fingerprint} | ({"links": kb.links_digest} if kb.links_digest else {})
        make_once(folder, FILE, made_of, make)
        return cls(articles, titles, *(np.load(folder / f"{name}.npy") for name in ("first", "documents")))

    def named(self, passage: int) -> list[int]:
        """Documents that a passage names, in the order of the text, without repetitions."""
        return list(self.document_E[self.first_N[passage] : self.first_N[passage + 1]].tolist())

    def neighbours(self, passage: int) -> Iterator[int]:
        """First passages of the documents that a passage names, then neighbours in the document of the passage.

        The neighbour in the document is its first passage. The neighbours of the first passage are all other passages.
        """
        own = int(self.articles.document_N[passage])
        yield from (self.articles.lead(document) for document in self.named(passage))
        lead = self.articles.lead(own)
        yield from [lead] if passage != lead else self.articles.passages([own])[1:].tolist()

    def expand(self, seeds: Sequence[int], hops: int, most: int) -> list[int]:
        """The seeds, followed by all passages that are at most `hops` edges away, nearest first; at most `most` passages."""
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
        """The relation of each passage to each other passage -> [K, K]. MENTIONS and MENTIONED precede PARENT and CHILD."""
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
    """`first_N` and `document_E` of the graph. Passages are read one after the other."""
    counts, documents = [], []
    with progress(total=len(kb), description="graph", unit="passage") as bar:
        for number, passage in enumerate(kb):
            own = int(articles.document_N[number])
            found = [one for one in dict.fromkeys(titles.named(passage)) if one != own]
            counts.append(len(found))
            documents.extend(found)
            bar.update(1)
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]), np.array(documents, dtype=np.int64)
