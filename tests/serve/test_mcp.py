"""`realm mcp`, used by the official Python client: over standard input and output, over HTTP, and in this process."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from realm import cli
from realm.serve.mcp import tool_server
from realm.serve.service import Service
from realm.workspace.living import LivingKnowledge
from tests.serve.conftest import CONFIG, Served
from tests.store.tiny import TinyTagger

mcp = pytest.importorskip("mcp")
streamable_http_client = pytest.importorskip("mcp.client.streamable_http").streamable_http_client
QUESTION = "who built a tower in Arden?"
TOKEN = "sixteen-characters"
Use = Callable[[Any], Coroutine[Any, Any, None]]


def command(kb: Path, model: Path, *words: str) -> list[str]:
    return ["-m", "realm", "mcp", "--kb", str(kb), "--model", str(model), "--set", "device=cpu", *words]


@contextmanager
def over_http(*words: str, **environment: str) -> Iterator[str]:
    """The address of the tools of a process of its own."""
    with subprocess.Popen(
        [sys.executable, *words, "--http", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
    ) as process:
        assert process.stderr is not None and process.stdout is not None
        try:
            line = process.stderr.readline()
            found = re.fullmatch(r"serving .* on (http://127\.0\.0\.1:\d+/mcp)\n", line)
            assert found is not None, line + process.stderr.read()
            yield found[1]
            process.terminate()
            process.wait(60)
            assert process.stdout.read() == ""
        finally:
            process.kill()


@contextmanager
def over_pipes(*words: str) -> Iterator["subprocess.Popen[str]"]:
    """The tools as a process of its own, whose input, output and errors are pipes."""
    with subprocess.Popen(
        [sys.executable, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        yield process


def in_process(kb: Path, model: Path, use: Use, writable: bool = False) -> None:
    """Runs `use` with a client that is connected to the tools without a transport."""

    async def run() -> None:
        service = Service(LivingKnowledge(str(kb), str(model), CONFIG, lambda name: TinyTagger()), CONFIG)
        async with service.running(writable), mcp.Client(tool_server(service, writable)) as client:
            await use(client)

    asyncio.run(run())


def without_times(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != "ms"}


async def the_tools_equal_the_api(client: Any, served: Served) -> None:
    """Compares each result with the response of the REST API to the same request."""
    listed = {tool.name: tool for tool in (await client.list_tools()).tools}
    assert list(listed) == ["search", "answer", "read_passage"]
    assert all(tool.output_schema and tool.annotations.read_only_hint for tool in listed.values())

    answered = await client.call_tool("answer", {"question": QUESTION, "top_k": 3})
    wanted = httpx.post(served.url + "/v1/answer", json={"question": QUESTION, "top_k": 3}).json()
    assert not answered.is_error
    assert without_times(answered.structured_content) == without_times(wanted)
    assert without_times(json.loads(answered.content[0].text)) == without_times(wanted)
    best = answered.structured_content["answers"][0]
    assert best["passage"]["text"][best["start"] : best["end"]] == best["text"]

    asked = {"question": QUESTION, "method": "bm25", "top_k": 2}
    found = await client.call_tool("search", asked)
    wanted = httpx.post(served.url + "/v1/retrieve", json=asked).json()
    assert without_times(found.structured_content) == without_times(wanted)

    id = found.structured_content["passages"][0]["id"]
    passage = await client.call_tool("read_passage", {"id": id})
    assert passage.structured_content == httpx.get(f"{served.url}/v1/passages/{id}").json()


def test_over_standard_input_and_output_the_tools_give_the_results_of_the_rest_api(served: Served) -> None:
    async def run() -> None:
        server = mcp.StdioServerParameters(
            command=sys.executable,
            args=command(served.kb, served.model),
            env=dict(os.environ) | {"OMP_NUM_THREADS": "1"},
        )
        async with mcp.Client(server) as client:
            assert "realm" in client.server_info.name
            await the_tools_equal_the_api(client, served)

    asyncio.run(run())


def test_over_http_the_tools_give_the_results_of_the_rest_api(served: Served) -> None:
    async def run(url: str) -> None:
        async with mcp.Client(url) as client:
            await the_tools_equal_the_api(client, served)

    with over_http(*command(served.kb, served.model)) as url:
        asyncio.run(run(url))
        body = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
        headers = {"Accept": "application/json, text/event-stream"}
        elsewhere = {"Host": "rebound.example"}, {"Origin": "https://page.example"}
        refused = [httpx.post(url, json=body, headers=headers | more).status_code for more in elsewhere]
        assert refused == [421, 403]
        with httpx.stream("GET", url, headers={"Accept": "text/event-stream"}) as endless:
            assert (endless.status_code, endless.headers["allow"]) == (405, "POST")


def test_standard_output_has_only_messages_of_the_protocol(served: Served) -> None:
    """An older client's handshake, written by hand; the process ends when the input ends."""
    client = {
        "protocolVersion": "2025-06-18",
        "capabilities": {},
        "clientInfo": {"name": "x", "version": "1"},
    }
    messages = [
        {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": client},
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        {
            "jsonrpc": "2.0",
            "id": 2,
            "method": "tools/call",
            "params": {"name": "answer", "arguments": {"question": QUESTION}},
        },
    ]
    with over_pipes(*command(served.kb, served.model)) as process:
        process.stdin.write("".join(json.dumps(message) + "\n" for message in messages))
        process.stdin.flush()
        replies = [json.loads(process.stdout.readline()) for _ in range(2)]
        process.stdin.close()
        assert process.stdout.read() == "" and process.wait(30) == 0 and process.stderr.read() == ""
    assert [reply["id"] for reply in replies] == [1, 2]
    assert replies[1]["result"]["structuredContent"]["answers"]


@pytest.mark.slow
def test_ctrl_c_ends_the_command_although_its_input_is_open(served: Served) -> None:
    message = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
    with over_pipes(*command(served.kb, served.model)) as process:
        process.stdin.write(json.dumps(message) + "\n")
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["id"] == 1
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == -signal.SIGINT and process.stderr.read() == ""


def test_the_tool_that_adds_is_there_only_if_it_is_allowed(own_kb: Any, qa_model: Path) -> None:
    document = {"title": "Oakham", "text": "Zebulon built a lighthouse in Oakham."}

    async def reads(client: Any) -> None:
        assert "add" not in [tool.name for tool in (await client.list_tools()).tools]
        assert (await client.call_tool("add", {"documents": [document]})).is_error

    async def writes(client: Any) -> None:
        added = await client.call_tool("add", {"documents": [document]})
        assert not added.is_error, added.content
        assert added.structured_content["ids"] == ["Oakham"] and added.structured_content["added"] == 1
        again = await client.call_tool("add", {"documents": [{"id": "copy", **document}]})
        assert again.structured_content["merged"] == {"copy": "Oakham"}
        found = await client.call_tool("search", {"question": "Zebulon lighthouse", "method": "bm25"})
        assert found.structured_content["passages"][0]["title"] == "Oakham"
        nameless = await client.call_tool("add", {"documents": [{"text": "a"}]})
        assert nameless.is_error and "neither an id nor a title" in nameless.content[0].text

    in_process(own_kb.folder, qa_model, reads)
    in_process(own_kb.folder, qa_model, writes, writable=True)


def test_the_tools_use_only_the_documents_that_match_a_filter(own_kb: Any, qa_model: Path) -> None:
    documents = [
        {"title": f"Oakham {year}", "text": f"Zebulon sold the bells in {year}.", "fields": {"year": year}}
        for year in (2000, 2001, 2002)
    ]

    async def use(client: Any) -> None:
        assert not (await client.call_tool("add", {"documents": documents})).is_error
        asked = {"question": "who sold the bells?", "where": "year > 2000"}
        found = (await client.call_tool("search", {**asked, "top_k": 100})).structured_content["passages"]
        assert sorted((one["document"], one["fields"]["year"]) for one in found) == [
            ("Oakham 2001", 2001),
            ("Oakham 2002", 2002),
        ]
        answered = (await client.call_tool("answer", {**asked, "where": "year = 2001"})).structured_content
        assert [one["fields"] for one in answered["passages"]] == [{"year": 2001}]
        assert answered["answers"][0]["passage"]["fields"] == {"year": 2001}
        whole = await client.call_tool("read_passage", {"id": found[0]["id"]})
        assert whole.structured_content["fields"] == found[0]["fields"]
        for tool in ("search", "answer"):
            refused = await client.call_tool(tool, {**asked, "where": "month = 1"})
            (content,) = refused.content
            assert refused.is_error and "month is not a field" in content.text and "\n" not in content.text
        refused = await client.call_tool("add", {"documents": [{**documents[0], "fields": {"title": "A"}}]})
        assert refused.is_error and "cannot be stored: 'title'" in refused.content[0].text

    in_process(own_kb.folder, qa_model, use, writable=True)


def test_wrong_arguments_are_explained_to_the_agent(served: Served) -> None:
    async def use(client: Any) -> None:
        for tool, arguments, says in (
            ("search", {"question": " "}, "question: the text is empty or white space"),
            ("search", {"question": "x", "top_k": 101}, "less than or equal to 100"),
            ("answer", {"question": "x", "top_k": 21}, "less than or equal to 20"),
            ("answer", {"question": "x", "method": "magic"}, "'dense', 'bm25' or 'hybrid'"),
            ("read_passage", {"id": "ffff"}, "no passage has the id 'ffff'"),
            ("read_passage", {}, "id: Field required"),
            ("search", {"question": "x", "filter": "year >= 2020"}, "search has no argument 'filter'"),
        ):
            result = await client.call_tool(tool, arguments)
            text = result.content[0].text
            assert result.is_error and says in text
            assert "pydantic" not in text and "\n" not in text

    in_process(served.kb, served.model, use)


def test_without_a_span_reader_the_tool_answer_explains_why_it_fails(
    served: Served, tiny_model_folder
) -> None:
    async def use(client: Any) -> None:
        assert not (await client.call_tool("search", {"question": QUESTION})).is_error
        result = await client.call_tool("answer", {"question": QUESTION})
        assert result.is_error and "no span reader" in result.content[0].text

    in_process(served.kb, tiny_model_folder, use)


def test_over_http_a_private_server_needs_the_token(served: Served) -> None:
    async def run(url: str) -> None:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with (
            httpx2.AsyncClient(headers=headers) as http,
            mcp.Client(streamable_http_client(url, http_client=http)) as client,
        ):
            assert (await client.call_tool("search", {"question": QUESTION})).structured_content["passages"]

    httpx2 = pytest.importorskip("httpx2")
    with over_http(*command(served.kb, served.model, "--private"), REALM_TOKEN=TOKEN) as url:
        assert httpx.post(url, json={}).status_code == 401
        for shown in ("Bearer wrong", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}x"):
            assert httpx.post(url, json={}, headers={"Authorization": shown}).status_code == 401
        for shown in (f"bearer {TOKEN}", f"Bearer  {TOKEN}"):  # as the REST API takes them
            assert httpx.post(url, json={}, headers={"Authorization": shown}).status_code != 401
        asyncio.run(run(url))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--port", "1"], "--port can only be used with --http"),
        (["--private"], "--private can only be used with --http"),
        (["--token-file", "x"], "--token-file can only be used with --http"),
        (["--http", "--private"], "--private needs a token of 16 or more"),
        (["--http", "--writable"], "--writable needs a token of 16 or more"),
        (["--http", "--token-file", "x"], "add --writable"),
        (["--http", "--port", "0"], "absent is not a knowledge base"),
        ([], "absent is not a knowledge base"),
    ],
)
def test_bad_use_is_one_line_and_exit_code_2(words, says, monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("REALM_TOKEN", raising=False)
    assert cli.main(["mcp", "--kb", "absent", "--model", "absent", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and re.fullmatch(r"realm: [^\n]+\n", captured.err) and says in captured.err
