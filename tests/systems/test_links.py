"""Links of a dump, from the markup to the column of the knowledge base and the edges of the graph, against a plain reading."""

import json
import random
import re

import mwparserfromhell
import pytest

from realm import cli
from realm.documents.reading import read_documents
from realm.store.knowledge_base import KnowledgeBase, build
from realm.systems.articles import Articles
from realm.systems.passage_graph import PassageGraph, Titles
from realm.systems.path_retriever import links_of
from realm.text.corpus import Passage
from realm.text.salient_spans import load_tagger
from tests.documents.writers import page, write_dump

TITLES = [f"Town {number}" for number in range(24)] + ["Ouse (river)", "AT&T", "Éclair"]
SHAPES = (
    "{title} stands near [[{title}|{word}]] and a mill.",
    "It sold ''[[{title}#History|{word}]]'' ({{{{IPA|x}}}}; ) to many.",
    "\n* [[{lower}|{{{{nowrap|{word}}}}}]]\n* No link.\n",
    '\n{{| class="wikitable"\n! Name !! Place\n|-\n| x || [[{title}|{word}]]\n|}}\n',
    "A red link leads to [[{word}_x]] here.",
    "A source says so.<ref>[[{title}|{word}]]</ref>",
    "[[File:A.png|thumb|[[{title}|{word}]]]] A picture.",
    "{{{{Infobox|place=[[{title}|{word}]]}}}} A box.",
    "[[:fr:Ville|{word}]] is French.[[fr:Ville]][[Category:{word}]]",
)


def markup(draw: random.Random, number: int) -> str:
    """Sentences with a link each; the words of every link occur only once in the dump."""
    parts = [f"'''{TITLES[number]}''' is a town."]
    for sentence in range(30):
        title = draw.choice(TITLES)
        shape = draw.choice(SHAPES)
        word = f"Word{number}x{sentence}y"
        parts.append(
            shape.format(title=title, lower=(title[0].lower() + title[1:]).replace(" ", "_"), word=word)
        )
    return " ".join([*parts, "\n== See also ==\n* [[Town 1|Unseen]]"])


def plain_reading(text: str) -> list[tuple[str, str]]:
    """Title and words of each link in the markup, wherever it stands, in order."""
    found = []
    for link in mwparserfromhell.parse(text).filter_wikilinks():
        title = str(link.title).split("#")[0].replace("_", " ").lstrip(":")
        words = re.search(r"Word\w+y", str(link.text if link.text is not None else link.title))
        if words and not title.startswith(("File:", "Category:")):
            found.append((title[0].upper() + title[1:], words[0]))
    return found


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    draw = random.Random(0)
    return {title: markup(draw, number) for number, title in enumerate(TITLES)}


@pytest.fixture(scope="module")
def kb(pages, tiny_model_folder, tmp_path_factory) -> KnowledgeBase:
    """Half of the pages built, the other half added, and a document of another format."""
    folder = tmp_path_factory.mktemp("links")
    written = [page(title, text) for title, text in pages.items()]
    written.insert(3, page("Old town", "#REDIRECT [[Town 1]]", redirect="Town 1"))
    first = write_dump(folder / "first.xml.bz2", written[:14])
    second = write_dump(folder / "second.xml", written[14:])
    plain = folder / "plain.jsonl"
    plain.write_text(json.dumps({"title": "Plain", "text": "Town 3 and Town 5 are near."}) + "\n")
    out = str(folder / "kb")
    settings = ["--tokenizer", str(tiny_model_folder), "--tagger", "rules", "--set", "passage_tokens=100"]
    assert cli.main(["kb", "build", str(first), "--out", out, *settings]) == 0
    assert cli.main(["kb", "add", str(second), str(plain), "--kb", out]) == 0
    return KnowledgeBase.open(out)


def links_in(passage: Passage, pages: dict[str, str]) -> list[str]:
    """Titles of the links whose words stand in a passage."""
    there = [title for title, words in plain_reading(pages[passage.title]) if words in passage.text]
    return list(dict.fromkeys(there))


def test_the_column_has_the_links_whose_words_stand_in_each_passage(kb, pages) -> None:
    passages = [passage for passage in kb if passage.title != "Plain"]
    assert len(passages) > 2 * len(pages)
    for passage in passages:
        assert passage.links == tuple(links_in(passage, pages))
    assert {"Fr:Ville", "AT&T", "Ouse (river)", "Town 7"} < {one for p in passages for one in p.links}
    assert [passage.links for passage in kb if passage.title == "Plain"] == [None]
    assert kb.verify() == []


def test_the_edges_of_the_graph_are_the_links(kb, pages, tmp_path) -> None:
    graph = PassageGraph.open(kb, tmp_path / "system")
    passages = list(kb)
    first = {title: kb.titles.index(title) for title in kb.titles}
    edges = 0
    for number, passage in enumerate(passages):
        wanted = ["Town 3", "Town 5"] if passage.title == "Plain" else links_in(passage, pages)
        there = [first[title] for title in wanted if title in first and title != passage.title]
        assert links_of(graph, number) == there
        edges += len(there)
    assert edges > len(passages)


def test_without_links_the_edges_are_titles_in_the_text_and_the_graph_is_made_anew(kb, tmp_path) -> None:
    with_links = PassageGraph.open(kb, tmp_path / "system")
    sources = [str(kb.folder.parent / name) for name in ("first.xml.bz2", "second.xml", "plain.jsonl")]
    documents = (document._replace(links=None) for document in read_documents(sources))
    build(tmp_path / "bare", documents, kb.config, kb.tokenizer, load_tagger("rules"))
    bare = KnowledgeBase.open(tmp_path / "bare")
    assert (bare.fingerprint, bare.links_digest) == (kb.fingerprint, "")
    graph = PassageGraph.open(bare, tmp_path / "system")
    titles = Titles(bare, Articles.of(bare))
    for number, passage in enumerate(bare):
        own = graph.articles.document_N[number]
        found = dict.fromkeys(titles.find(passage.text))
        assert graph.named(number) == [document for document in found if document != own]
    assert graph.document_E.tolist() != with_links.document_E.tolist()
