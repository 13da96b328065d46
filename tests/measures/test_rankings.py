"""`realm evaluate --beir` and `realm compare-models` on a dozen made-up towns with random weights."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realm import cli
from realm.errors import InputError
from realm.measures.collection import read_collection, read_judgements
from realm.measures.paired import ComparedJson, ComparedRankingsJson
from realm.measures.ranking import RankingFile, RankingJson, measure, rank_documents
from realm.measures.runs import Run, read_run, write_run
from realm.qa.pipeline import AnswerConfig
from realm.qa.question_sets import searcher
from realm.store.knowledge_base import KnowledgeBase
from tests.schemas import assert_holds
from tests.towns import TOWNS, write_corpus, write_encoder


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BEIR collection in `towns`, its knowledge base in `kb`, and two models: `plain` and `other`.

    The document `bee` has the same text as `b2`, and the query `b3` has the id of a document.
    """
    home = tmp_path_factory.mktemp("beir")
    texts = write_corpus(home / "corpus.jsonl")
    write_encoder(home / "encoder", texts)
    beir = home / "towns"
    (beir / "qrels").mkdir(parents=True)
    documents = [
        {"_id": f"b{place}", "title": town, "text": " ".join([text] * (1 + 3 * (place % 2)))}
        for place, (town, text) in enumerate(zip(TOWNS, texts, strict=True))
    ]
    documents.append({**documents[2], "_id": "bee"})
    queries = [{"_id": f"q{place}", "text": f"When was {town} founded?"} for place, town in enumerate(TOWNS)]
    queries += [{"_id": "b3", "text": texts[3]}, {"_id": "not-judged", "text": "Who keeps bees?"}]
    for name, lines in (("corpus", documents), ("queries", queries)):
        (beir / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    judged = [(f"q{place}", f"b{place}", 2) for place in range(len(TOWNS))]
    judged += [(f"q{place}", f"b{(place + 4) % len(TOWNS)}", 1) for place in range(len(TOWNS))]
    judged += [("q2", "bee", 1), ("b3", "b7", 1), ("b3", "b3", 1), ("q0", "b5", 0)]
    rows = ["query-id\tcorpus-id\tscore", *("\t".join(map(str, one)) for one in judged)]
    (beir / "qrels" / "test.tsv").write_text("\n".join(rows) + "\n")
    run("kb", "build", beir / "corpus.jsonl", "--out", home / "kb", "--tokenizer", home / "encoder",
        "--set", "tagger=rules", "--set", "passage_tokens=40", "--set", "held_out=0.2")  # fmt: skip
    for name, seed in (("plain", 0), ("other", 1)):
        settings = ("steps=0", "query_tokens=24", "embedder.dim=8", f"seed={seed}", "principal=false")
        words = [word for one in settings for word in ("--set", one)]
        run("mlm", "--kb", home / "kb", "--init", home / "encoder", "--out", home / name, *words)
        run("index", "--kb", home / "kb", "--model", home / name)
    return home


def run(*words: str | Path) -> None:
    assert cli.main([str(word) for word in words]) == 0


def ndcg(grades: dict[str, int], ranking: list[str]) -> float:
    """nDCG@10 with the grade as gain, as in trec_eval."""
    gain = sum(grades.get(one, 0) / math.log2(rank + 1) for rank, one in enumerate(ranking[:10], start=1))
    best = sorted(grades.values(), reverse=True)[:10]
    return gain / sum(grade / math.log2(rank + 1) for rank, grade in enumerate(best, start=1))


def judgements(home: Path) -> dict[str, dict[str, int]]:
    grades: dict[str, dict[str, int]] = {}
    for line in (home / "towns" / "qrels" / "test.tsv").read_text().splitlines()[1:]:
        query, document, grade = line.split("\t")
        grades.setdefault(query, {})[document] = int(grade)
    return grades


def evaluate(home: Path, *words: str | Path) -> tuple[RankingFile, Run]:
    out, saved = home / "report.json", home / "run.trec"
    run("evaluate", "--kb", home / "kb", "--beir", home / "towns", "--out", out, "--save-run", saved, *words)
    return json.loads(out.read_text()), read_run(saved)


@pytest.mark.parametrize("method", ["dense", "bm25", "hybrid"])
def test_measures_of_a_ranking_are_those_of_an_independent_formula(home, method) -> None:
    found, ranked = evaluate(home, "--model", home / "plain", "--method", method)
    assert_holds(RankingFile, found)
    grades = judgements(home)
    assert found["n"] == len(grades) == 13
    assert [one["id"] for one in found["outcomes"]] == [*(f"q{place}" for place in range(12)), "b3"]
    for one in found["outcomes"]:
        own = grades[one["id"]]
        # trec_eval orders documents with equal scores by their ids, backwards
        ranking = [name for _, name in sorted(((v, k) for k, v in ranked[one["id"]].items()), reverse=True)]
        relevant = {document for document, grade in own.items() if grade > 0}
        first = next((rank for rank, document in enumerate(ranking[:10], 1) if document in relevant), 0)
        assert one["measures"]["ndcg@10"] == pytest.approx(ndcg(own, ranking), abs=1e-6)
        assert one["measures"]["mrr@10"] == pytest.approx(1 / first if first else 0)
        assert one["measures"]["recall@100"] == pytest.approx(len(relevant & {*ranking}) / len(relevant))
    for name, one in found["measures"].items():
        values = [outcome["measures"][name] for outcome in found["outcomes"]]
        assert one["mean"] == pytest.approx(100 * sum(values) / len(values), abs=0.006)
        assert one["ci95"][0] <= one["mean"] <= one["ci95"][1]


@pytest.mark.parametrize("method", ["dense", "bm25", "hybrid"])
def test_a_document_has_the_score_of_its_best_passage(home, method) -> None:
    """Compared with all passages, ranked one query at a time."""
    kb, search = searcher(str(home / "kb"), str(home / "plain"), method, AnswerConfig())
    assert len(kb) > len(TOWNS)  # some documents have several passages
    collection = read_collection(home / "towns")
    ranked = rank_documents(kb, collection.queries, search)
    for query in collection.queries:
        (score_K,), (number_K,) = search([query.text], len(kb))
        best: dict[str, float] = {}
        for score, number in zip(score_K, number_K, strict=True):
            if number >= 0:
                (passage,) = kb.passages([int(number)])
                names = ["b2", "bee"] if passage.document_id == "b2" else [passage.document_id]
                for name in names:
                    best[name] = max(best.get(name, -math.inf), float(score))
        best.pop(query.id, None)
        # A product near zero is a difference of larger numbers, so its error is relative to those, not to itself.
        assert ranked[query.id] == pytest.approx(best, rel=1e-4, abs=1e-4)
        assert list(ranked[query.id].values()) == sorted(ranked[query.id].values(), reverse=True)


def test_a_few_passages_of_one_document_do_not_hide_other_documents(home, monkeypatch) -> None:
    """The search asks for more passages until it has enough documents."""
    collection = read_collection(home / "towns")
    kb, search = searcher(str(home / "kb"), str(home / "plain"), "dense", AnswerConfig())
    whole = rank_documents(kb, collection.queries, search)
    monkeypatch.setattr("realm.measures.ranking.DOCUMENTS", 6)
    monkeypatch.setattr("realm.measures.ranking.PASSAGES_PER_DOCUMENT", 1)
    for query, scores in rank_documents(kb, collection.queries, search).items():
        assert list(scores) == list(whole[query])[:6]
        assert scores == pytest.approx(dict(list(whole[query].items())[:6]), rel=1e-4)


def test_a_saved_run_is_measured_as_the_model_that_made_it(home, capsys) -> None:
    found, _ = evaluate(home, "--model", home / "plain")
    assert capsys.readouterr().err.endswith(f"evaluate: the report is in {home / 'report.json'}\n")
    run("evaluate", "--beir", home / "towns", "--run", home / "run.trec", "--json")
    again = json.loads(capsys.readouterr().out)
    assert_holds(RankingJson, again)
    assert again == {key: value for key, value in found.items() if key != "outcomes"}


def test_a_given_run_is_measured_without_the_document_of_the_query(home, tmp_path, capsys) -> None:
    """The query `b3` has the id of a document, which is relevant and comes first; the query `q0` has another document."""
    file = tmp_path / "run.trec"
    measured = []
    for own, other in (("b3 Q0 b3 1 9 theirs\n", "b3 Q0 b7 2 5 theirs\n"), ("", "b3 Q0 b7 1 5 theirs\n")):
        file.write_text(f"{own}{other}q0 Q0 b0 1 1 theirs\n")
        run("evaluate", "--beir", home / "towns", "--run", file, "--json")
        measured.append(json.loads(capsys.readouterr().out))
    assert measured[0] == measured[1]
    assert measured[0]["unranked"] == 11
    file.write_text("b3 Q0 b3 1 9 theirs\nq0 Q0 b0 1 1 theirs\n")
    run("evaluate", "--beir", home / "towns", "--run", file, "--json")
    assert json.loads(capsys.readouterr().out)["unranked"] == 12


def test_relevant_documents_that_the_knowledge_base_lacks_are_counted(home, tmp_path, capsys) -> None:
    kb = KnowledgeBase.open(home / "kb")
    assert kb.document_ids() == {*(f"b{place}" for place in range(12)), "bee"}
    beir = tmp_path / "more"
    (beir / "qrels").mkdir(parents=True)
    (beir / "queries.jsonl").write_text((home / "towns" / "queries.jsonl").read_text())
    (beir / "qrels" / "dev.tsv").write_text("q0\tb0\t1\nq0\tunknown\t1\n")
    words = ["evaluate", "--kb", home / "kb", "--method", "bm25", "--beir", beir, "--split", "dev"]
    run(*words)
    printed = capsys.readouterr().out
    assert printed.startswith("1 query of the split dev\n")
    assert "relevant documents that are not in the knowledge base, and count as not found: 1\n" in printed
    (beir / "qrels" / "dev.tsv").write_text("q0\tunknown\t1\n")
    assert cli.main([str(word) for word in words]) == 2
    assert "has no relevant document of" in capsys.readouterr().err


IDS = st.text(st.characters(categories=("L", "N", "P")), min_size=1, max_size=8)


@given(st.dictionaries(IDS, st.dictionaries(IDS, st.integers(-999, 999), min_size=1), min_size=1))
def test_a_written_run_is_read_as_it_was(tmp_path_factory, scores: dict[str, dict[str, int]]) -> None:
    file = tmp_path_factory.mktemp("run") / "run.trec"
    ordered: Run = {
        query: dict(sorted(own.items(), key=lambda one: -one[1])) for query, own in scores.items()
    }
    write_run(file, ordered)
    assert read_run(file) == ordered


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("run", "q0 Q0 b0 1 0.5\n", ":1: the line is 'q0 Q0 b0 1 0.5', and must be"),
        ("run", "q0 Q0 b0 1 nan realm\n", ":1: the line is"),
        ("run", "q0 Q0 b0 1 2 realm\nq0 Q0 b0 2 1 realm\n", ":2: query q0 has document b0 twice"),
        ("run", "\n", "has no lines"),
        ("run", "other Q0 b0 1 2 realm\n", "have no query of the split test"),
        ("qrels/test.tsv", "query-id\tcorpus-id\tscore\nq0\tb0\tmuch\n", "test.tsv:2: the line is"),
        ("qrels/test.tsv", "q0\tb0\t65536\n", "test.tsv:1: the line is"),
        ("qrels/test.tsv", f"q0\tb0\t1\nq0\tb1\t{-(2**31) - 1}\n", "test.tsv:2: the line is"),
        ("qrels/test.tsv", f"q0\tb0\t{'9' * 5000}\n", "test.tsv:1: the line is"),
        ("qrels/test.tsv", "q0\tb0\t0\n", "has no relevant document for any query"),
        ("qrels/test.tsv", "q99\tb0\t1\n", "judgements for queries that are not in"),
        ("queries.jsonl", '{"id": "q0"}\n', "queries.jsonl:1: the line is"),
        ("queries.jsonl", '{"_id": "q0", "text": "a"}\n' * 2, "two queries with the id 'q0'"),
    ],
)
def test_a_bad_file_gives_one_line_with_its_place(home, tmp_path, capsys, file, text, message) -> None:
    beir = tmp_path / "towns"
    (beir / "qrels").mkdir(parents=True)
    for name in ("queries.jsonl", "qrels/test.tsv"):
        (beir / name).write_text((home / "towns" / name).read_text())
    (beir / "run").write_text("q0 Q0 b0 1 1.0 realm\n")
    (beir / file).write_text(text)
    assert cli.main(["evaluate", "--beir", str(beir), "--run", str(beir / "run")]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_a_run_cannot_have_ids_with_spaces(tmp_path) -> None:
    with pytest.raises(InputError, match="cannot have ids with spaces"):
        write_run(tmp_path / "run", {"q": {"a b": 1.0}})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--questions", "q.jsonl"], "--beir measures rankings of documents: leave out --questions"),
        (["--gold"], "leave out --gold"),
        (["--scoring", "squad", "--regex"], "leave out --regex, --scoring"),
        (["--run", "run", "--method", "bm25"], "--run already contains the rankings"),
        (["--run", "run", "--set", "read=3"], "--run already contains the rankings"),
        (["--run", "run", "--config", "paper"], "--run already contains the rankings"),
        (["--run", "run", "--split", "../test"], "'../test' is not the name of a split"),
        ([], "--beir needs the knowledge base"),
        (["--kb", "kb"], "--method dense, the default, needs --model"),
        (["--kb", "kb", "--method", "hybrid"], "--method hybrid needs --model"),
        (["--kb", "kb", "--split", "dev"], "dev.tsv; splits with a file: test"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(home, capsys, words, message) -> None:
    assert cli.main(["evaluate", "--beir", str(home / "towns"), *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--out", "--save-run"])
@pytest.mark.parametrize("name", ["queries.jsonl", "qrels/test.tsv"])
def test_files_of_the_collection_are_not_overwritten(home, flag, name, capsys) -> None:
    file = home / "towns" / name
    before = file.read_bytes()
    words = ["evaluate", "--kb", home / "kb", "--beir", home / "towns", "--method", "bm25", flag, file]
    assert cli.main([str(word) for word in words]) == 2
    assert f"{flag} {file} is a file of the collection" in capsys.readouterr().err
    assert file.read_bytes() == before


@pytest.mark.parametrize("command", [["evaluate", "--kb", "kb"], ["compare-models", "a", "b", "--kb", "kb"]])
def test_a_split_without_a_collection_is_refused(command, capsys) -> None:
    assert cli.main([*command, "--questions", "q.jsonl", "--split", "dev"]) == 2
    assert "--split names a split of a test collection: give --beir" in capsys.readouterr().err


def test_the_largest_and_the_smallest_grade_are_measured(home, tmp_path) -> None:
    file = tmp_path / "test.tsv"
    file.write_text(f"q0\tb0\t65535\nq0\tb1\t{-(2**31)}\n")
    grades = read_judgements(file)
    assert grades == {"q0": {"b0": 65535, "b1": -(2**31)}}
    collection = read_collection(home / "towns")._replace(grades=grades)
    assert measure(collection, {"q0": {"b0": 1.0}}).value_Q["mrr@10"][0] == 1.0


def test_only_a_line_feed_ends_a_line(tmp_path) -> None:
    """Ids can have other characters at which str.splitlines() splits."""
    file = tmp_path / "file"
    file.write_text("a\u2028b\td\x85e\t1\r\nq\td\t2\n", encoding="utf-8")
    assert read_judgements(file) == {"a\u2028b": {"d\x85e": 1}, "q": {"d": 2}}
    file.write_text("q0 Q0 d 1 2 realm\u2028\nwrong\n", encoding="utf-8")
    with pytest.raises(InputError, match=":2: the line is 'wrong'"):
        read_run(file)


@pytest.mark.parametrize("method", [None, "dense", "hybrid"])
def test_only_a_search_by_words_needs_no_model(home, method) -> None:
    with pytest.raises(InputError, match=f"the method {method or 'dense'} needs a model"):
        searcher(str(home / "kb"), None, method, AnswerConfig())


def test_a_query_without_a_ranking_counts_as_zero(home) -> None:
    collection = read_collection(home / "towns")
    found = measure(collection, {"q0": {"b0": 2.0, "b4": 1.0}, "q1": {}})
    for value_Q in found.value_Q.values():
        assert value_Q[0] == pytest.approx(1.0)
        assert not value_Q[1:].any()
    assert found.as_dict()["unranked"] == len(collection.queries) - 1
    assert found.lines()[-1].endswith(f"count as 0 %: {len(collection.queries) - 1}")


# -- two models


def compared(home: Path, capsys, *words: str | Path) -> Any:
    capsys.readouterr()
    run("compare-models", home / "plain", home / "other", "--kb", home / "kb", "--json", *words)
    return json.loads(capsys.readouterr().out)


def test_two_models_are_compared_query_by_query(home, capsys) -> None:
    found = compared(home, capsys, "--beir", home / "towns")
    assert_holds(ComparedRankingsJson, found)
    alone = {name: evaluate(home, "--model", home / name)[0] for name in ("plain", "other")}
    for name, difference in found["difference"].items():
        a, b = (alone[one]["measures"][name]["mean"] for one in ("plain", "other"))
        assert (found["a"][name], found["b"][name]) == (a, b)
        assert difference["points"] == pytest.approx(a - b, abs=0.011)
        assert difference["low"] <= difference["points"] <= difference["high"]


def test_two_models_are_compared_question_by_question(home, capsys) -> None:
    questions = home / "questions.jsonl"
    asked = [
        {"question": f"When was {town} founded?", "answers": [str(year)]}
        for town, year in zip(TOWNS, (1492, 1563, 1648, 1815) * 3, strict=True)
    ]
    questions.write_text("".join(json.dumps(line) + "\n" for line in asked))
    for name, seed in (("plain", 3), ("other", 4)):
        settings = ("steps=2", "batch_size=2", "retrieved=5", "dev_every=2", f"seed={seed}", "dropout=0.0")
        words = [word for one in settings for word in ("--set", one)]
        run("finetune", "--kb", home / "kb", "--model", home / name, "--train", questions, "--dev", questions,
            "--out", home / f"{name}-qa", *words)  # fmt: skip
    capsys.readouterr()
    run("compare-models", home / "plain-qa", home / "other-qa", "--kb", home / "kb",
        "--questions", questions, "--json")  # fmt: skip
    found = json.loads(capsys.readouterr().out)
    assert_holds(ComparedJson, found)
    outcomes = {}
    for side, name in (("a", "plain-qa"), ("b", "other-qa")):
        out = home / f"{name}.json"
        run("evaluate", "--kb", home / "kb", "--model", home / name, "--questions", questions, "--out", out)
        alone = json.loads(out.read_text())
        outcomes[side] = alone["outcomes"]
        assert found[side]["exact match"] == alone["em"]
        assert found[side]["f1"] == alone["f1"]
        assert found[side]["mrr"] == alone["mrr"]
        assert {k: found[side][f"recall@{k}"] for k in (1, 5, 20)} == {
            k: alone["recall"][str(k)] for k in (1, 5, 20)
        }
    for own, other, listed in (("a", "b", found["only_a"]), ("b", "a", found["only_b"])):
        right = [
            line["question"]
            for line, one, two in zip(asked, outcomes[own], outcomes[other], strict=True)
            if one["correct"] and not two["correct"]
        ]
        assert [one["question"] for one in listed] == right
        assert found["difference"]["exact match"][f"only_{own}"] == len(right)


def test_models_without_span_readers_are_compared_by_their_passages(home, capsys) -> None:
    found = compared(home, capsys, "--questions", home / "questions.jsonl")
    assert set(found["difference"]) == {"recall@1", "recall@5", "recall@20", "mrr"}
    assert not found["only_a"] and not found["only_b"]
