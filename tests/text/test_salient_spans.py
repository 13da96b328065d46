import contextlib
import gc
import itertools
import multiprocessing
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import spacy
from hypothesis import given
from hypothesis import strategies as st

from realm import local_processes
from realm.errors import InputError, RealmError
from realm.local_processes import map_in_processes
from realm.text import salient_spans, tagger_groups
from realm.text.corpus import Annotations, PassagesConfig, Span
from realm.text.dates import find_dates
from realm.text.salient_spans import Tagger, load_tagger

DATED = {
    "born 26 July 1928.": ["26 July 1928"],
    "on July 26, 1928, and": ["July 26, 1928"],
    "in July 1928": ["July 1928"],
    "in 1928.": ["1928"],
    "(1928)": ["1928"],
    "the 1990s": ["1990s"],
    "mid-1990s, late 1930s": ["mid-1990s", "late 1930s"],
    "the 19th century": ["19th century"],
    "an early 20th-century poet": ["early 20th-century"],
    "the nineteenth century": ["nineteenth century"],
    "the 5th and 6th centuries AD": ["5th and 6th centuries AD"],
    "the 3rd millennium BC": ["3rd millennium BC"],
    "in 44 BC.": ["44 BC"],
    "44 B.C. was": ["44 B.C."],
    "753–510\u00a0BCE": ["753–510\u00a0BCE"],
    "1,200 BC": ["1,200 BC"],
    "AD 79": ["AD 79"],
    "15 March 44 BC": ["15 March 44 BC"],
    "1914–1918": ["1914–1918"],
    "1914–18": ["1914–18"],
    "1939-45": ["1939-45"],
    "1914 – 1918": ["1914 – 1918"],
    "between 1914 and 1918": ["1914", "1918"],
    "26–28 July 1928": ["26–28 July 1928"],
    "June 10 – 12": ["June 10 – 12"],
    "5 May 1821–6 June 1822": ["5 May 1821", "6 June 1822"],
    "4th of July": ["4th of July"],
    "Sept. 11, 2001": ["Sept. 11, 2001"],
    "May–June 1940": ["May–June 1940"],
    "the summer of 1969": ["summer of 1969"],
    "2018-12-20 or 9/24/2023": ["2018-12-20", "9/24/2023"],
    "July\n1928": ["July\n1928"],
    "a post-1945 order": ["1945"],
    "On July 26, 500 people": ["July 26"],
}

UNDATED = [
    *("1500 km", "1928 people", "2000 m", "1836 times", "1,928", "19281", "928", "$1928", "1928.5", "1928%"),
    *("12.1928", "F-1500", "A1928", "1928th", "3000", "900–1000 km", "may 5", "the 19th", "May I", "0-1928"),
    "July\n\n1928"[:5],
]


@pytest.mark.parametrize("text", DATED)
def test_date_is_found(text: str) -> None:
    assert [text[span.start : span.end] for span in find_dates(text)] == DATED[text]
    assert {span.label for span in find_dates(text)} == {"DATE"}


@pytest.mark.parametrize("text", UNDATED)
def test_number_that_is_no_date_is_not_found(text: str) -> None:
    assert find_dates(text) == []


def test_date_does_not_reach_over_a_blank_line() -> None:
    assert [(span.start, span.end) for span in find_dates("July 4\n\n1928")] == [(0, 6), (8, 12)]


# --- spaCy ----------------------------------------------------------------------------------------


@pytest.fixture
def tagger(tmp_path: Path) -> Callable[..., Tagger]:
    """A spaCy pipeline on disk that knows the given phrases, in the place of a trained recogniser."""

    def make(phrases: dict[str, str], processes: int = 1) -> Tagger:
        pipeline = spacy.blank("en")
        ruler = pipeline.add_pipe("entity_ruler", name="ner")
        ruler.add_patterns([{"label": label, "pattern": phrase} for phrase, label in phrases.items()])
        pipeline.to_disk(tmp_path / "pipeline")
        return load_tagger(f"spacy:{tmp_path}/pipeline", processes)

    return make


def found(tagger: Tagger, text: str) -> list[tuple[str, str]]:
    (annotations,) = tagger.annotate([text])
    return [(text[span.start : span.end], span.label) for span in annotations.spans]


def test_names_and_dates_are_kept_and_amounts_are_not(tagger) -> None:
    phrases = {"Ada": "PERSON", "three": "CARDINAL", "first": "ORDINAL", "10%": "PERCENT", "$5": "MONEY"}
    phrases |= {"noon": "TIME", "5 km": "QUANTITY", "Paris": "GPE", "0.92": "ORG"}
    text = "Ada first ate three cakes, 10% of them for $5 at noon, 5 km from Paris in 1928 (0.92)."
    assert found(tagger(phrases), text) == [("Ada", "PERSON"), ("Paris", "GPE"), ("1928", "DATE")]


def test_article_possessive_and_quotes_are_no_part_of_a_name(tagger) -> None:
    phrases = {
        "the United Nations'": "ORG",
        "The Hague's": "GPE",
        '"Hamlet"': "WORK_OF_ART",
        "the": "ORG",
        '"': "ORG",
    }
    text = "At the United Nations' seat and The Hague's \"Hamlet\" the end."
    assert [name for name, _ in found(tagger(phrases), text)] == ["United Nations", "Hague", "Hamlet"]


def test_date_without_a_point_in_time_is_dropped(tagger) -> None:
    dates = ["today", "annual", "later that year", "three days", "30 years", "Monday"]
    kept = ["last July", "the winter of 1928"]
    text = "; ".join([*dates, *kept])
    spans = found(tagger(dict.fromkeys([*dates, *kept], "DATE")), text)
    assert spans == [("last July", "DATE"), ("winter of 1928", "DATE")]


def test_name_wins_over_a_date_inside_it_and_a_date_over_a_name_inside_it(tagger) -> None:
    phrases = {"1936 Olympics": "EVENT", "BC": "ORG", "between 1914 and 1918": "DATE", "May": "PERSON"}
    text = "The 1936 Olympics, 44 BC, between 1914 and 1918; 5 May 1821; May wrote."
    assert found(tagger(phrases), text) == [
        ("1936 Olympics", "EVENT"),
        *(("44 BC", "DATE"), ("1914", "DATE"), ("1918", "DATE"), ("5 May 1821", "DATE")),
        ("May", "PERSON"),
    ]


def test_sentences_end_at_blank_lines_and_take_closing_quotes_in() -> None:
    text = "Heading\n\nHe said: “One.” And two!\n  \n ... \n\nThree"
    (annotations,) = load_tagger("rules").annotate([text])
    assert [text[a:b] for a, b in annotations.sentences] == [
        "Heading",
        "He said: “One.”",
        "And two!\n  \n ...",
        "Three",
    ]


@pytest.mark.parametrize("name", ["rules", "realm"])
def test_each_item_of_a_list_and_each_row_of_a_markdown_table_is_a_sentence(name: str) -> None:
    items = [
        "Rivers of the shire:",
        "- Ouse, which rises near Arden",
        "* Tees",
        "2) Wear",
        "| Town | People |",
        "| Arden | 500 |",
    ]
    text = "\n  ".join(items)
    (annotations,) = load_tagger(name).annotate([text])
    assert [text[a:b] for a, b in annotations.sentences] == items


def test_long_text_is_tagged_in_pieces_as_if_it_were_whole(tagger, monkeypatch) -> None:
    ada = tagger({"Ada": "PERSON"})
    texts = ["Ada came.\n\nIt was 1928. " * 30, "", "Ada. " * 9, "x" * 700, "\n\n Ada"]
    whole = list(ada.annotate(texts))
    assert whole[0].spans[-1] == Span(30 * 24 - 6, 30 * 24 - 2, "DATE")
    monkeypatch.setattr(tagger_groups, "PIECE_CHARS", 100)
    pieces = list(ada.annotate(texts))
    assert [p.spans for p in pieces] == [w.spans for w in whole]
    assert pieces[:3] == whole[:3] and pieces[4] == whole[4] and whole[1] == Annotations((), ())
    assert pieces[3].sentences == tuple((i, i + 100) for i in range(0, 700, 100))


def test_annotations_of_long_texts_arrive_while_most_texts_are_still_unread(tagger, monkeypatch) -> None:
    """So that a progress bar moves: 64 texts at once were minutes of work without a sign."""
    monkeypatch.setattr(tagger_groups, "GROUP_CHARS", 1_000)
    taken: list[int] = []

    def texts() -> Iterator[str]:
        for number in range(200):
            taken.append(number)
            yield "Ada left. " * 30

    with contextlib.closing(tagger({"Ada": "PERSON"}, 2).annotate(texts())) as annotations:
        next(annotations)
    assert len(taken) <= 24


@pytest.mark.parametrize("count", [0, 1, 64, 1000])
def test_two_processes_find_the_same_in_the_same_order(count: int, tagger, monkeypatch) -> None:
    monkeypatch.setattr(tagger_groups, "PIECE_CHARS", 100)
    texts = [f"Ada saw {n}. Nothing else. " * (1 + 7 * (n % 31 == 0)) for n in range(1000, 1000 + count)]
    assert list(tagger({"Ada": "PERSON"}, 2).annotate(texts)) == list(
        tagger({"Ada": "PERSON"}).annotate(texts)
    )
    assert not multiprocessing.active_children()


@pytest.mark.slow  # two processes that import spaCy
def test_on_macos_the_processes_start_fresh_and_find_the_same(tagger, monkeypatch) -> None:
    texts = [f"Ada saw {n}. Nothing else." for n in range(1000, 1200)]
    expected = list(tagger({"Ada": "PERSON"}).annotate(texts))
    monkeypatch.setattr(local_processes, "FRESH", True)
    monkeypatch.setattr(os, "fork", None)
    with contextlib.closing(tagger({"Ada": "PERSON"}, 2).annotate(texts)) as annotations:
        assert [next(annotations)] == expected[:1]
        assert {type(process).__name__ for process in multiprocessing.active_children()} == {"SpawnProcess"}
        assert list(annotations) == expected[1:]
    assert not multiprocessing.active_children()


def test_few_texts_start_no_process_and_more_than_a_group_start_one_for_each_core(
    tagger, monkeypatch
) -> None:
    texts = ["Ada."] * (tagger_groups.GROUP + 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda who: {0, 3, 5})
    every_core = tagger({"Ada": "PERSON"}, 0)
    annotations = every_core.annotate(texts[1:])
    next(annotations)
    assert not multiprocessing.active_children()
    annotations.close()
    annotations = every_core.annotate(texts)
    next(annotations)
    assert len(multiprocessing.active_children()) == 3
    annotations.close()


def test_an_error_of_the_texts_or_an_early_end_leaves_no_process(tagger) -> None:
    def texts():
        yield from ["Ada."] * 500
        raise InputError("no more")

    two = tagger({"Ada": "PERSON"}, 2)
    with pytest.raises(InputError, match="no more"):
        list(two.annotate(texts()))
    assert not multiprocessing.active_children()
    annotations = two.annotate(itertools.repeat("Ada."))
    next(annotations)
    assert len(multiprocessing.active_children()) == 2
    annotations.close()
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_a_command_that_is_stopped(end: signal.Signals, tagger) -> None:
    two = tagger({"Ada": "PERSON"}, 2)
    alive, held = os.pipe()  # read to its end once no process holds the other end

    def command() -> None:
        os.setpgrp()
        os.close(alive)
        gc.callbacks.clear()  # Hypothesis adds a function, and Python ignores a Ctrl-C that comes while it runs
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # if this process used Ray, Ray has set a handler
        with contextlib.closing(two.annotate(itertools.repeat("Ada saw 1928."))) as annotations:
            next(annotations)
            os.write(held, b"!")
            for _ in annotations:
                pass

    parent = multiprocessing.get_context("fork").Process(target=command)
    parent.start()
    os.close(held)
    assert os.read(alive, 1) == b"!"
    begin = time.monotonic()
    if end == signal.SIGINT:
        os.killpg(parent.pid, end)  # as Ctrl-C does
    else:
        os.kill(parent.pid, end)
    ended, _, _ = select.select([alive], [], [], 5)
    took = time.monotonic() - begin
    if not ended:
        os.killpg(parent.pid, signal.SIGKILL)
    parent.join()
    os.close(alive)
    assert ended and took < 3
    assert parent.exitcode == (1 if end == signal.SIGINT else -end)


def test_the_other_processes_do_the_work_of_one_that_is_killed(tagger) -> None:
    texts = [f"Ada saw {1000 + number}." for number in range(5000)]
    annotations = tagger({"Ada": "PERSON"}, 2).annotate(texts)
    found = list(itertools.islice(annotations, 3))
    multiprocessing.active_children()[0].kill()
    assert found + list(annotations) == list(tagger({"Ada": "PERSON"}).annotate(texts))


class Strange(Exception):
    """An exception that can be pickled, but not read again."""

    def __init__(self, one: int, other: int):
        super().__init__(f"strange {one} {other}")


@pytest.mark.parametrize("error", [Strange(1, 2), OSError(lambda: None)])
def test_an_exception_that_cannot_be_sent_ends_the_work(error) -> None:
    def work(group):
        raise error

    with pytest.raises(RuntimeError, match=type(error).__name__):
        list(map_in_processes(lambda: work, itertools.repeat(["Ada."]), 2))
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("processes", [1, 2])
def test_texts_before_an_error_are_tagged_first(tagger, processes: int) -> None:
    def texts():
        yield from ["Ada saw 1928."] * 10
        raise ValueError("the file ends here")

    annotations = tagger({"Ada": "PERSON"}, processes).annotate(texts())
    assert len(list(itertools.islice(annotations, 10))) == 10
    with pytest.raises(ValueError, match="the file ends here"):
        next(annotations)


def test_a_text_that_kills_its_processes_does_not_kill_all_of_them() -> None:
    def work(group):
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RealmError, match="3 processes were killed during the same work"):
        list(map_in_processes(lambda: work, iter([["Ada."]]), 4))


def test_it_is_an_error_if_all_processes_are_killed(tagger) -> None:
    annotations = tagger({"Ada": "PERSON"}, 2).annotate(itertools.repeat("Ada saw 1928."))
    next(annotations)
    for process in multiprocessing.active_children():
        process.kill()
    with pytest.raises(RealmError, match="all processes were killed"):
        list(annotations)


def test_tagging_streams(tagger) -> None:
    taken = []

    def texts():
        for number in range(10_000):
            taken.append(number)
            yield "Ada."

    next(tagger({"Ada": "PERSON"}).annotate(texts()))
    assert len(taken) < 1000


RULES = load_tagger("rules")


@given(st.lists(st.text("Ad. \n\"19280s-–'", max_size=60), max_size=4))
def test_annotations_are_in_order_without_overlap_and_cover_the_text(texts: list[str]) -> None:
    annotated = list(RULES.annotate(texts))
    assert len(annotated) == len(texts)
    for text, (sentences, spans) in zip(texts, annotated, strict=True):
        for ranges in (sentences, [(span.start, span.end) for span in spans]):
            bounds = [bound for pair in ranges for bound in pair]
            assert bounds == sorted(bounds) and all(a < b for a, b in ranges)
        assert "".join("".join(text[a:b] for a, b in sentences).split()) == "".join(text.split())


@pytest.mark.slow
def test_the_words_of_a_long_corpus_do_not_stay_in_memory(tagger, monkeypatch) -> None:
    texts = [f"Ada met word{number} on {number % 28 + 1} May 1900." for number in range(300)]
    expected = list(tagger({"Ada": "PERSON"}).annotate(texts))
    monkeypatch.setattr(salient_spans, "MOST_WORDS", 0)
    bounded = tagger({"Ada": "PERSON"})
    assert list(bounded.annotate(texts)) == expected
    words = len(bounded._pipeline.language.vocab.strings)
    assert list(bounded.annotate([f"other {text}{number}" for number, text in enumerate(texts)]))
    vocabulary = bounded._pipeline.language.vocab
    assert len(vocabulary.strings) == words
    assert len(vocabulary) < 1000  # in a memory zone, this number counts every new word again


@pytest.mark.slow
def test_a_pipeline_that_is_replaced_on_disk_while_it_is_used_stays_the_pipeline_that_was_loaded(
    tagger, monkeypatch
) -> None:
    monkeypatch.setattr(salient_spans, "MOST_WORDS", 0)
    monkeypatch.setattr(tagger_groups, "GROUP", 2)
    texts = [f"Ada met Bea and word{number}." for number in range(8)]
    used = tagger({"Ada": "PERSON"})
    expected, version = list(used.annotate(texts)), used.version()
    other = tagger({"Bea": "PERSON"})  # in the same folder
    assert list(used.annotate(texts)) == expected != list(other.annotate(texts))
    assert used.version() == version != other.version()


# --- a token classifier ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def classifier(tmp_path_factory) -> Path:
    """A BERT of one layer whose weights read a label off each wordpiece."""
    import torch
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertForTokenClassification, PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "ada", "love", "##lace", "rome", "in", "."]
    labels = ["O", "B-PER", "I-PER", "B-LOC", "CARDINAL"]
    label_of = {"ada": 1, "love": 2, "##lace": 3, "rome": 3}  # "##lace" alone would be a place
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=16,
        id2label=dict(enumerate(labels)),
        label2id={label: i for i, label in enumerate(labels)},
    )
    model = BertForTokenClassification(config)
    with torch.no_grad():
        for parameter in model.bert.parameters():
            parameter.zero_()
        for norm in (m for m in model.modules() if isinstance(m, torch.nn.LayerNorm)):
            norm.weight.fill_(1.0)
        model.bert.embeddings.word_embeddings.weight[:, :16] = torch.eye(len(words), 16)
        model.classifier.weight.zero_()
        for word, label in label_of.items():
            model.classifier.weight[label, words.index(word)] = 10.0
        model.classifier.bias.copy_(torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0]))
    folder = tmp_path_factory.mktemp("classifier")
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    ).save_pretrained(folder)
    return folder


def test_token_classifier_gives_spans_of_whole_words(classifier: Path) -> None:
    tagger = load_tagger(f"hf:{classifier}")
    assert tagger.name == f"hf:{classifier}"
    text = "In Rome. \n\nAda Lovelace in 1840, Rome."
    assert found(tagger, text) == [
        ("Rome", "LOC"),
        ("Ada Lovelace", "PERSON"),
        ("1840", "DATE"),
        ("Rome", "LOC"),
    ]


def test_token_classifier_reads_past_its_longest_input(classifier: Path) -> None:
    text = "in " * 50 + "Ada in Rome"
    assert found(load_tagger(f"hf:{classifier}"), text) == [("Ada", "PERSON"), ("Rome", "LOC")]


def test_token_classifier_answers_for_each_text_in_order(classifier: Path) -> None:
    texts = ["Ada.", "", " ", "In. Rome. Ada.", "in " * 50 + "Rome"] * 20
    spans = [len(a.spans) for a in load_tagger(f"hf:{classifier}").annotate(texts)]
    assert spans == [1, 0, 0, 2, 1] * 20


# --- names of taggers -----------------------------------------------------------------------------


def test_unknown_tagger_is_an_error(tmp_path: Path, monkeypatch) -> None:
    for name in ("flair:ner", "spacy:", "hf:", "rules:x", ""):
        with pytest.raises(InputError, match="unknown tagger"):
            load_tagger(name)
    with pytest.raises(InputError, match="cannot load the spaCy pipeline no_such_model"):
        load_tagger("no_such_model")
    with pytest.raises(InputError, match="is not a token classifier"):
        load_tagger(f"hf:{tmp_path}")
    spacy.blank("en").to_disk(tmp_path / "blank")
    with pytest.raises(InputError, match="has no named entity recogniser, only nothing"):
        load_tagger(f"spacy:{tmp_path}/blank")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match="needs transformers: pip install"):
        load_tagger(f"hf:{tmp_path}")


def test_packaged_copy_stands_in_for_spacys_small_english_model(monkeypatch) -> None:
    monkeypatch.setattr("spacy.util.is_package", lambda name: False)
    monkeypatch.setitem(salient_spans.STAND_INS, "en_core_web_sm", "a_copy")
    with pytest.raises(InputError, match="cannot load the spaCy pipeline a_copy"):
        load_tagger("spacy:en_core_web_sm")


@pytest.mark.slow
@pytest.mark.parametrize("name", [PassagesConfig.tagger, "spacy:en_core_web_sm"])
def test_taggers_read_english(name: str) -> None:
    text = "Ada Lovelace was born in London on 10 December 1815. She died in 1852, today long ago."
    tagger = load_tagger(name)
    assert found(tagger, text) == [
        ("Ada Lovelace", "PERSON"),
        *(("London", "GPE"), ("10 December 1815", "DATE"), ("1852", "DATE")),
    ]
    (annotations,) = tagger.annotate([text])
    assert len(annotations.sentences) == 2
    assert load_tagger(tagger.name).name == tagger.name
