"""The REST API through a real socket: the same answers as in the process, and training runs."""

import asyncio
import fcntl
import inspect
import json
import logging
import shutil
from collections import Counter
from datetime import date
from decimal import Decimal
from types import SimpleNamespace

import httpx
import numpy as np
import pytest

from realm import cli
from realm.errors import InputError
from realm.model.calibration import Calibration
from realm.model.manifest import set_calibration
from realm.qa.filling import Filler
from realm.qa.pipeline import Answerer
from realm.questions import make_questions
from realm.serve import app
from realm.serve.client import Client
from realm.serve.settings import ServeConfig
from realm.store.knowledge_base import KnowledgeBase
from realm.workspace.folder import Workspace
from realm.workspace.report import FitJson
from tests.conftest import TOWNS
from tests.serve.asking import OAKHAM, QUESTION, assert_problem, metric, post, wait_for
from tests.serve.conftest import CONFIG, TOKEN, running


@pytest.mark.parametrize("method", ["dense", "bm25", "hybrid"])
def test_the_server_and_the_pipeline_give_equal_answers(served, method) -> None:
    answerer = Answerer.load(str(served.kb), str(served.model), CONFIG)
    (expected,) = answerer.answer_batch([QUESTION], method, 4)
    said = post(served, "/v1/answer", {"question": QUESTION, "method": method, "top_k": 4}).json()
    contract = expected.to_json()
    assert said["question"] == QUESTION
    assert [a["text"] for a in said["answers"]] == [a["text"] for a in contract["answers"]]
    assert said["answers"][0].keys() == contract["answers"][0].keys()
    assert said["answers"][0]["passage"].keys() == contract["answers"][0]["passage"].keys()
    for mine, theirs in zip(said["answers"], contract["answers"], strict=True):
        assert mine["score"] == pytest.approx(theirs["score"], rel=1e-4)
        assert mine["passage"]["text"][mine["start"] : mine["end"]] == mine["text"]
    assert [p["id"] for p in said["passages"]] == [p.id for p in expected.passages]
    best = max(said["passages"], key=lambda passage: passage["span"]["score"])
    assert best["id"] == said["answers"][0]["passage"]["id"]
    assert best["span"] == {name: said["answers"][0][name] for name in best["span"]}
    for passage in said["passages"]:
        span = passage["span"]
        assert passage["text"][span["start"] : span["end"]] == span["text"]
    assert said["null_probability"] == pytest.approx(expected.null_probability, rel=1e-4)
    assert said["index"]["version"] == 1 and said["index"]["step"] == 3 and said["index"]["created"]
    assert said["ms"].keys() == {"queue", "embed", "search", "read"}


def test_a_server_ranks_by_the_models_method_where_a_request_names_none(served, tmp_path) -> None:
    assert served.client().health()["method"] == "dense"
    shutil.copytree(served.model, tmp_path / "model")
    set_calibration(tmp_path / "model", Calibration(method="hybrid"))
    with running(served.kb, tmp_path / "model") as other:
        client = other.client()
        assert client.health()["method"] == "hybrid"
        wait_for(lambda: client.health()["words"])  # before anybody asks, though it is written to
        hybrid = client.search(QUESTION, 5, method="hybrid")
        assert client.search(QUESTION, 5) == hybrid != client.search(QUESTION, 5, method="dense")
        said = client.answers(QUESTION, top_k=5)
        assert [one.id for one in said.passages] == [one.id for one in hybrid]


def test_many_questions_are_answered_in_their_order_as_one_object_or_line_by_line(served) -> None:
    questions = [f"on which river lies {town}?" for town in TOWNS] * 3
    whole = post(served, "/v1/answer", {"questions": questions}).json()["results"]
    assert [one["question"] for one in whole] == questions
    with httpx.stream(
        "POST",
        served.url + "/v1/answer",
        json={"questions": questions},
        headers={"Accept": "application/x-ndjson"},
    ) as response:
        assert response.headers["content-type"].startswith("application/x-ndjson")
        lines = [json.loads(line) for line in response.iter_lines()]
    assert [one["question"] for one in lines] == questions
    assert [one["answers"][0]["text"] for one in lines] == [one["answers"][0]["text"] for one in whole]


def test_fill_gives_the_predictions_of_the_filler(served) -> None:
    sentence = "Arden lies on the river [MASK] between [MASK] and the hills."
    expected = Filler.load(str(served.kb), str(served.model), CONFIG).fill(sentence).to_json()
    said = post(served, "/v1/fill", {"sentence": sentence}).json()
    assert said["masks"][0][0]["text"] == expected["masks"][0][0]["text"]
    for mine, theirs in zip(said["passages"], expected["passages"], strict=True):
        assert mine["id"] == theirs["id"]
        np.testing.assert_allclose(
            [mine[k] for k in ("probability", "likelihood", "utility")],
            [theirs[k] for k in ("probability", "likelihood", "utility")],
            rtol=1e-3,
            atol=1e-5,
        )


def assert_same_names(value: object, row: object) -> None:
    """Every key of the JSON is an attribute, at every depth, with the same value (a float within 1e-3)."""
    if isinstance(row, dict):
        for name, one in row.items():
            assert_same_names(value[name] if isinstance(value, dict) else getattr(value, name), one)
    elif isinstance(row, list):
        assert isinstance(value, list)
        for mine, theirs in zip(value, row, strict=True):
            assert_same_names(mine, theirs)
    elif isinstance(row, float):
        assert value == pytest.approx(row, rel=1e-3, abs=1e-5)
    else:
        assert value == row


def test_python_has_the_names_of_the_json_for_answers_passages_and_fillings(served) -> None:
    client, on = served.client(), (str(served.kb), str(served.model), CONFIG)
    body = {"question": QUESTION, "method": "hybrid", "top_k": 3}
    row = post(served, "/v1/answer", body).json()
    answers = client.answers(**body)
    assert answers.ms.keys() == row.pop("ms").keys()
    assert_same_names(answers, row)
    assert answers.answers[0].passage.title == row["answers"][0]["passage"]["title"]
    (own,) = Answerer.load(*on).answer_batch([QUESTION], "hybrid", 3)
    row["index"].pop("knowledge")  # which a server alone knows
    assert_same_names(own, row)
    assert_same_names(own, own.to_json() | {"ms": own.ms})

    assert_same_names(client.search(**body), post(served, "/v1/retrieve", body).json()["passages"])

    for asked in ({}, {"target": "salt"}):
        body = {"sentence": "Arden lies on the river [MASK] between the hills.", **asked}
        row = post(served, "/v1/fill", body).json()
        times, index = row.pop("ms"), row.pop("index")
        said = client.fill(**body)
        assert said["ms"].keys() == times.keys() and said["index"] == index
        assert_same_names(said, row)
        assert_same_names(Filler.load(*on).fill(**body), row)


def test_a_target_is_scored_as_the_filler_scores_it(served) -> None:
    sentence = "Arden lies on the river [MASK] between the hills."
    expected = Filler.load(str(served.kb), str(served.model), CONFIG).fill(sentence, "salt").to_json()
    said = post(served, "/v1/fill", {"sentence": sentence, "target": "salt"}).json()
    assert said["target"]["text"] == "salt"
    for name in ("probability", "without_retrieval"):
        assert said["target"][name] == pytest.approx(expected["target"][name], rel=1e-3)
    assert said["null"]["likelihood"] == said["target"]["without_retrieval"]
    assert [one["likelihood"] for one in said["passages"]] == pytest.approx(
        [one["likelihood"] for one in expected["passages"]], rel=1e-3
    )
    assert "target" not in post(served, "/v1/fill", {"sentence": sentence}).json()
    assert_same_names(served.client().fill(sentence, target="salt")["target"], said["target"])


def test_targets_asked_at_once_are_each_scored_by_their_own_word(served) -> None:
    sentence, words = "Arden lies on the river [MASK] between the hills.", ["salt", "wool", "salt", None]

    async def everybody() -> list[httpx.Response]:
        async with httpx.AsyncClient(timeout=30) as client:
            bodies = [{"sentence": sentence, "target": word} for word in words]
            return await asyncio.gather(*(client.post(served.url + "/v1/fill", json=body) for body in bodies))

    rows = [response.json() for response in asyncio.run(everybody())]
    assert [row.get("target", {}).get("text") for row in rows] == words
    assert rows[0]["target"] == rows[2]["target"] != rows[1]["target"]


@pytest.mark.parametrize(
    ("sentence", "target", "status", "says"),
    [
        ("[MASK] and [MASK]", "salt", 400, r"one \[MASK\], but it has 2"),
        ("The [MASK].", "日本", 400, "no wordpieces for the target"),
        ("The [MASK].", "x" * 40, 400, "40 wordpieces, but the model can read"),
        ("The [MASK].", " ", 422, "target"),
        ("The [MASK].", "", 422, "target"),
        ("The [MASK].", "x" * 2001, 422, "target.*2000"),
        ("The [MASK].", ["salt"], 422, "target"),
    ],
)
def test_a_target_that_cannot_be_scored_is_one_line(served, sentence, target, status, says) -> None:
    assert_problem(post(served, "/v1/fill", {"sentence": sentence, "target": target}), status, says)


def test_passages_and_documents_are_found_by_their_ids_and_nothing_else_is(served) -> None:
    passages = list(KnowledgeBase.open(served.kb))
    client = served.client()
    of_d3 = [one for one in passages if one.document_id == "d3"]
    found = client.passage(of_d3[0].id)
    assert (found["text"], found["document"], found["previous"]) == (of_d3[0].text, "d3", None)
    assert found["next"] == of_d3[1].id
    document = httpx.get(served.url + "/v1/documents/d3").json()
    assert document["passages"] == [one.id for one in of_d3]
    for path in (
        "v1/passages/0000000000000000",
        "v1/passages/xyz",
        "v1/passages/-1",
        "v1/passages/" + "f" * 40,
        "v1/documents/d99",
    ):
        assert httpx.get(f"{served.url}/{path}").status_code == 404


def test_example_questions_are_made_from_the_documents(own_server) -> None:
    def examples() -> list[str]:
        return httpx.get(own_server.url + "/v1/examples").json()["questions"]

    assert examples() == []  # of the towns the rules make nothing
    towns = ["Oakham", "Selby", "Thirsk", "Whitby", "Yarm", "Ripon"]
    text = "{0} is a market town in England. {0} has a population of 4,{1}00. It was founded in 1{1}45 by Berthe."
    own_server.client(TOKEN).add(
        [{"title": town, "text": text.format(town, n)} for n, town in enumerate(towns, start=1)]
    )
    made = {one.question for one in make_questions(KnowledgeBase.open(own_server.kb))}
    found = examples()
    assert found == examples() and len(found) == len(set(found)) == 3 and set(found) <= made


def test_a_body_that_is_not_json_is_a_problem_of_the_body(served) -> None:
    headers = {"Content-Type": "application/json"}
    problem = httpx.post(f"{served.url}/v1/answer", content=b'{"question": "x"', headers=headers).json()
    assert problem["parameter"] == "body" and problem["detail"].startswith("body: JSON")


def test_example_questions_are_those_of_the_last_fit(own_server) -> None:
    examples = [{"question": "when was Arden founded?"}, {"question": "who built it?"}]
    report = dict.fromkeys(FitJson.__required_keys__) | {"examples": examples}
    file = own_server.kb.parent / "report.json"
    file.write_text(json.dumps(report))
    assert own_server.client(TOKEN).examples() == ["when was Arden founded?", "who built it?"]
    for other in ("[]", '{"examples": 1}', '{"examples": [1]}', "{"):  # a file that is not of a fit
        file.write_text(other)
        del own_server.knowledge.current.__dict__["examples"]
        assert own_server.client(TOKEN).examples() == []


def test_example_questions_are_first_those_that_are_answered_as_expected(own_server, monkeypatch) -> None:
    client = own_server.client(TOKEN)
    towns = ["Oakham", "Selby", "Thirsk", "Whitby", "Yarm", "Ripon", "Louth"]
    text = "{0} is a market town in England. {0} has a population of 4,{1}00. It was founded in 1{1}45 by Berthe."
    client.add([{"title": town, "text": text.format(town, n)} for n, town in enumerate(towns, start=1)])
    expected = {one.question: one.answers[0] for one in make_questions(KnowledgeBase.open(own_server.kb))}

    asked: list[str] = []

    def answer_batch(questions: list[str], method: str | None) -> list[SimpleNamespace]:
        asked.extend(questions)
        texts = ["?"] * (len(questions) - 2) + [expected[one] for one in questions[-2:]]
        return [SimpleNamespace(found=True, answers=[SimpleNamespace(text=one)]) for one in texts]

    monkeypatch.setattr(own_server.knowledge.current.answerer, "answer_batch", answer_batch)
    assert client.examples() == [*asked[-2:], asked[0]] and len(asked) > 3


def test_the_corpus_has_a_name_its_sizes_and_a_few_titles(served, qa_model) -> None:
    kb = KnowledgeBase.open(served.kb)
    corpus = served.client().corpus()
    assert corpus["name"] == served.kb.parent.name  # the folder of the knowledge base is called kb
    assert corpus["passages"] == len(kb)
    assert corpus["documents"] == len({passage.document_id for passage in kb})
    assert (corpus["fields"], corpus["filter"]) == ({}, None)
    assert len(corpus["titles"]) == len(set(corpus["titles"])) == 6 and set(corpus["titles"]) <= set(TOWNS)
    with running(served.kb, qa_model, ServeConfig(device="cpu", name="<b>Towns</b>")) as other:
        assert other.client().corpus() == corpus | {"name": "<b>Towns</b>"}


def test_a_corpus_without_documents_has_neither_titles_nor_examples(own_server) -> None:
    client = own_server.client(TOKEN)
    for one in client.documents(count=1000)["documents"]:
        client.delete(one["id"])
    assert client.corpus()["titles"] == client.examples() == [] and client.corpus()["documents"] == 0


def test_the_list_of_documents_comes_in_parts_and_by_prefix(served) -> None:
    client, listed, start = served.client(), [], 0
    while start is not None:
        part = client.documents(start, 5)
        listed += part["documents"]
        start = part["next"]
    kb = KnowledgeBase.open(served.kb)
    counts = Counter(passage.document_id for passage in kb)
    assert {one["id"]: one["passages"] for one in listed} == counts and len(listed) == len(counts)
    assert [one["title"] for one in listed] == TOWNS
    assert [one["id"] for one in client.documents(prefix="Bex")["documents"]] == ["d1"]
    assert client.documents(10**9) == {"documents": [], "next": None}
    assert (
        client.document("d1")["title"] == "Bexley" and client.versions()["in_use"] == client.health()["index"]
    )


def test_documents_with_fields_are_filtered_and_shown_with_their_fields(own_server) -> None:
    client = own_server.client(TOKEN)
    fields = [{"year": 2000 + n, "url": f"https://example.org/{n}", "tags": ["a", n]} for n in range(4)]
    texts = [f"Oakham {n} lies on the Tarn. Berthe sold the bells of Oakham." for n in range(4)]
    client.add(
        {"id": f"new{n}", "title": f"Oakham {n}", "text": text, "fields": {**one, "none": None}}
        for n, (text, one) in enumerate(zip(texts, fields, strict=True))
    )
    corpus = client.corpus()
    assert corpus["fields"] == {"year": "whole number", "url": "text", "tags": "text"}
    assert client.documents(where=corpus["filter"])["documents"]
    for method in ("dense", "bm25", "hybrid"):
        hits = client.search("who sold the bells of Oakham?", 100, method=method, where="year >= 2002")
        assert sorted((hit.document, hit.fields["year"]) for hit in hits) == [
            ("new2", 2002),
            ("new3", 2003),
        ]
        where = "year = 2001 and url like 'https:%'"
        answers = client.answers("who sold the bells of Oakham?", method=method, top_k=5, where=where)
        assert {one.document for one in answers.passages} == {"new1"}
        assert answers.answers[0].passage.fields == fields[1]
    (answers,) = client.answer_many(["who sold the bells?"], where="year = 2000")
    assert [one.fields for one in answers.passages] == [fields[0]]
    assert [one["id"] for one in client.documents(where="year > 2001")["documents"]] == ["new2", "new3"]
    assert client.document("new3")["fields"] == client.passage(hits[-1].id)["fields"] | fields[3] == fields[3]
    none = client.answers("who sold the bells?", where="year = 1")
    assert (none.answers, none.passages, none.found) == ([], [], False)
    for path in ("answer", "retrieve"):
        for where, status, says in (
            ("text = 'a'", 400, "text is not a field; the fields are id"),
            ("year = 'x'", 400, "without quotation marks"),
            ("year = 1" + " " * 2000, 422, "where: 2008 characters are too many"),
            (" ", 422, "where: the text is empty"),
        ):
            response = post(own_server, f"/v1/{path}", {"question": "x", "where": where})
            assert_problem(response, status, says)
            assert response.json()["parameter"] == "where"
    assert_problem(httpx.get(f"{own_server.url}/v1/documents?where=nothing"), 400, "nothing is not a field")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"year": 2020, "title": "A"}, "'title'"),
        ({"long": "x" * 2001, "x" * 101: 1, "text": "a"}, f"'long', '{'x' * 101}', 'text'"),
        ({"og:url": "a", "og_url": "b"}, "'og_url'"),
        ({"--": 1}, "'--'"),
    ],
)
def test_a_document_with_a_field_that_cannot_be_stored_is_refused_with_the_names(
    own_server, fields, named
) -> None:
    before = own_server.client().health()["documents"]
    response = post(
        own_server,
        "/v1/documents",
        {"documents": [{**OAKHAM, "fields": fields}]},
        headers={"Authorization": f"Bearer {TOKEN}"},
    )
    assert_problem(response, 422, f"documents.0.fields: cannot be stored: {named}; give each field a name")
    assert own_server.client().health()["documents"] == before


def test_a_refused_parameter_of_the_address_has_the_name_that_the_client_wrote(served) -> None:
    problem = httpx.get(served.url + "/v1/documents", params={"count": "many"}).json()
    assert problem["parameter"] == "count" and problem["detail"].startswith("count: ")


def test_a_text_in_the_address_has_a_limit(served) -> None:
    for name in ("prefix", "where"):
        response = httpx.get(f"{served.url}/v1/documents", params={name: "x" * 1001})
        assert_problem(response, 422, f"{name}: 1001 characters are too many: shorten the text to 1000")


def test_the_api_and_its_python_client_have_one_set_of_names(served) -> None:
    description = httpx.get(served.url + "/openapi.json").json()
    operations = [one for path in description["paths"].values() for one in path.values()]
    methods = {name: getattr(Client, name) for name in vars(Client) if not name.startswith("_")}
    # `answer` is the best of `answers`, and `search` has its name in a workspace.
    names_of = {"answer": "answers", "retrieve": "search"}
    operations = [one for one in operations if one["operationId"] != "metrics"]
    called = [names_of.get(one["operationId"], one["operationId"]) for one in operations]
    assert set(called) == methods.keys() - {"answer", "answer_many"}
    bodies = description["components"]["schemas"]
    for one, name in zip(operations, called, strict=True):
        names = {parameter["name"] for parameter in one.get("parameters", [])}
        if "requestBody" in one:
            schema = one["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
            names |= bodies[schema]["properties"].keys() - {"questions"}  # which `answer_many` sends
            assert bodies[schema]["examples"]
        assert names == inspect.signature(methods[name]).parameters.keys() - {"self"}
    assert inspect.signature(Client.answer).parameters == inspect.signature(Client.answers).parameters


def test_a_program_can_use_a_server_in_place_of_a_workspace() -> None:
    """Each call of a workspace that a client has too can be made in the same words."""
    for name in ("answer", "answers", "answer_many", "search", "add", "fill"):
        of_workspace, of_client = (
            list(inspect.signature(getattr(cls, name)).parameters.values()) for cls in (Workspace, Client)
        )
        given = {one.name: one.kind for one in of_client}
        assert [one.kind for one in of_workspace] == [given.get(one.name, one.kind) for one in of_workspace]
        assert [one.kind for one in of_workspace if one.kind != one.KEYWORD_ONLY] == [
            one.kind for one in of_client if one.kind != one.KEYWORD_ONLY
        ]


def test_an_id_may_have_line_breaks(own_server) -> None:
    client = own_server.client(TOKEN)
    texts = {"Prices": "Old.", "Prices\n": "New.", "A\nB": "Two lines.", "a/b": "A path."}
    client.add({"title": name, "text": text} for name, text in texts.items())
    assert {name: client.document(name)["text"] for name in texts} == texts
    assert client.delete("Prices\n") == 1 and client.document("Prices")["text"] == "Old."
    assert [client.delete(name) for name in ("Prices", "A\nB", "a/b")] == [1, 1, 1]


def test_a_client_takes_what_a_workspace_takes(own_server) -> None:
    client = own_server.client(TOKEN)
    day = date(2020, 5, 1)
    client.add(
        [
            {
                "title": "Since",
                "text": "It is here.",
                "since": day,
                "fields": {"year": Decimal("2.5"), "since": 1},
            }
        ]
    )
    assert client.document("Since")["fields"] == {"since": "2020-05-01", "year": 2.5}
    assert client.search("Since", 1, method="bm25")[0].document == "Since"
    assert client.answer("who built a tower?") == client.answers("who built a tower?").answers[0]
    assert len(list(client.answer_many(one for one in (QUESTION, QUESTION)))) == 2
    for call, says in (
        (lambda: client.answer_many(QUESTION), "give a list of questions"),
        (lambda: client.add({"title": "One", "text": "One."}), "give a list of documents"),
        (lambda: client.add([{"title": "One", "text": "One.", "of": {1}}]), "cannot be written as JSON"),
        (lambda: client.add(["One."]), "it must be a mapping with a text"),
        (lambda: client.document(5), "the id is 5: it must be a text"),
        (lambda: client.delete("\ud800"), "the id: "),
        (lambda: client.answer(QUESTION, where="year = 1"), "no passage to read that matches the filter"),
    ):
        with pytest.raises(InputError, match=says):
            call()
    client.delete("Since")


def test_a_document_over_the_limit_of_its_knowledge_base_is_refused(own_server) -> None:
    with pytest.raises(
        InputError, match="'Long' has 1,000,001 characters, over the limit of 1,000,000: split it"
    ):
        own_server.client(TOKEN).add([{"title": "Long", "text": "x" * 1_000_001}])


def test_questions_of_many_clients_share_batches(served) -> None:
    count, total = 'realm_batch_questions_count{kind="answer"}', 'realm_batch_questions_sum{kind="answer"}'
    post(served, "/v1/answer", {"question": QUESTION})
    before = metric(served, count), metric(served, total)

    async def everybody() -> list[httpx.Response]:
        async with httpx.AsyncClient(timeout=30) as client:
            return await asyncio.gather(
                *(
                    client.post(served.url + "/v1/answer", json={"question": f"what of {t}?"})
                    for t in TOWNS * 4
                )
            )

    responses = asyncio.run(everybody())
    assert [r.json()["question"] for r in responses] == [f"what of {t}?" for t in TOWNS * 4]
    assert metric(served, total) - before[1] == 4 * len(TOWNS)
    assert metric(served, count) - before[0] < 2 * len(TOWNS)


def test_a_client_object_answers_as_the_command_line_does(served, capsys, monkeypatch) -> None:
    monkeypatch.setattr(
        logging.getLogger("realm"), "handlers", []
    )  # the command line would leave capsys' stream there
    client = served.client()
    answers = client.answers(QUESTION)
    assert [a.text for one in client.answer_many([QUESTION, "why?"]) for a in one.answers][:5] == [
        a.text for a in answers.answers
    ]
    assert cli.main(["answer", QUESTION, "--server", served.url + "/", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert list(row) == ["question", "found", "answers", "index", "ms"]
    assert [a["text"] for a in row["answers"]] == [a.text for a in answers.answers]
    assert cli.main(["answer", QUESTION, "--server", served.url]) == 0
    assert capsys.readouterr().out.splitlines() == answers.lines()


def test_a_run_is_followed_line_by_line_while_it_grows(tiny_kb, qa_model, tmp_path) -> None:
    (tmp_path / "realm.training").mkdir()
    (tmp_path / "done").mkdir()
    (tmp_path / "done" / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n')
    metrics = tmp_path / "realm.training" / "metrics.jsonl"
    metrics.write_text('{"step": 1, "loss": 3.5}\n{"step": 2, "lo')
    with (
        running(tiny_kb.folder, qa_model, runs=tmp_path) as served,
        (tmp_path / "realm.training" / "lock").open("ab") as lock,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        get = lambda path: httpx.get(served.url + path).json()  # noqa: E731
        assert {(r["name"], r["state"]) for r in get("/v1/runs")["runs"]} == {
            ("realm", "training"),
            ("done", "finished"),
        }
        first = get("/v1/runs/realm")
        assert first["rows"] == [{"step": 1, "loss": 3.5}] and first["state"] == "training"
        with metrics.open("a") as file:
            file.write('ss": 3.25}\nnonsense\n')
        second = get(f"/v1/runs/realm?after={first['next']}")
        assert second["rows"] == [{"step": 2, "loss": 3.25}]
        assert get(f"/v1/runs/realm?after={second['next']}")["rows"] == []
        fcntl.flock(lock, fcntl.LOCK_UN)  # as the system does when the trainer is killed
        assert get("/v1/runs/realm")["state"] == "stopped"
        metrics.write_text('{"step": 1, "loss": 9.0}\n')  # begun anew
        assert get(f"/v1/runs/realm?after={second['next']}")["rows"] == [{"step": 1, "loss": 9.0}]
        assert httpx.get(served.url + "/v1/runs/%2e%2e").status_code == 404
        assert_problem(httpx.get(served.url + "/v1/runs/absent"), 404, "no run has the name 'absent'")


def test_a_run_that_went_wrong_or_ended_just_now_is_shown_as_far_as_it_is(
    tiny_kb, qa_model, tmp_path, monkeypatch
) -> None:
    (tmp_path / "realm").mkdir()
    metrics = tmp_path / "realm" / "metrics.jsonl"
    metrics.write_text('{"step": 1, "loss": NaN, "grad": -Infinity}\n')
    with running(tiny_kb.folder, qa_model, runs=tmp_path) as served:
        assert httpx.get(served.url + "/v1/runs/realm").json()["rows"] == [
            {"step": 1, "loss": None, "grad": None}
        ]
        found = app.runs(tmp_path)
        monkeypatch.setattr(app, "runs", lambda folder: found)
        metrics.unlink()  # as when a run's working folder goes between two looks
        assert_problem(httpx.get(served.url + "/v1/runs/realm"), 404, "'realm' has just ended")
        monkeypatch.undo()
        assert app.runs(tmp_path) == []
