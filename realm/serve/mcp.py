"""The server of `realm mcp`: the tools `search`, `answer`, `read_passage` and `add` of the Model Context Protocol (MCP).

A tool has the arguments and the result of a request of the REST API (`realm.serve.schemas`). Agents use the tools over standard
input and output, or over HTTP.
"""

import asyncio
import contextlib
import functools
import hmac
import json
import logging
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Annotated, Any, TypeVar, cast

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.transport_security import TransportSecuritySettings
from mcp_types import ToolAnnotations
from pydantic import Field, ValidationError
from starlette.types import ASGIApp, Receive, Scope, Send

from realm import __version__
from realm.errors import shortened
from realm.model.calibration import Method
from realm.serve import responses, schemas
from realm.serve.http.connections import http_server
from realm.serve.http.errors import from_error, problem, wrong_input
from realm.serve.http.middleware import Middleware, own_hosts
from realm.serve.http.tracing import exported
from realm.serve.server import bound, log_address
from realm.serve.service import Kind, Service, answers_of, hits_of
from realm.serve.settings import BODY_BYTES, MOST_DOCUMENTS, MOST_READ, MOST_RETRIEVED, ServeConfig
from realm.workspace.living import LivingKnowledge

Result = TypeVar("Result")
PATH = "/mcp"
"""Path of the tools on an HTTP server."""
INSTRUCTIONS = (
    "These tools search a fixed collection of documents. `answer` extracts short answers, each with its passage "
    "and its probability; if `found` is false, the best answer is a guess. `search` returns the best passages for a question. "
    "`read_passage` returns a passage with the ids of its neighbours. Cite the title of the passage that contains an answer."
)
READS = ToolAnnotations(read_only_hint=True, open_world_hint=False)
WRITES = ToolAnnotations(
    read_only_hint=False, destructive_hint=True, idempotent_hint=True, open_world_hint=False
)

Where = Annotated[
    schemas.Filter | None,
    Field(
        description="Filter over the fields of documents, such as \"year >= 2020 and source = 'handbook'\"; null: no filter"
    ),
]
Ranking = Annotated[
    Method | None,
    Field(
        description="Rank passages by vectors (dense), words (bm25) or both (hybrid); null: the default of the model"
    ),
]


def serve_stdio(kb: str, model: str, config: ServeConfig, writable: bool, traces: bool) -> None:
    """Serves the tools over standard input and output until the input ends. Standard output has only messages of the protocol.

    Raises:
        InputError: knowledge base, model and index do not fit together.
    """
    _log_errors()
    with exported(traces, by_libraries=True) as provider:
        with contextlib.redirect_stdout(sys.stderr):  # later, the server itself redirects other output
            service = Service(_knowledge(kb, model, config, writable), config, provider)
        tools = tool_server(service, writable)

        async def run() -> None:
            async with service.running(writable):
                await tools.run_stdio_async()

        # Python's own handler of Ctrl-C would wait for the thread that reads the input. Every change on disk survives a kill.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        asyncio.run(run())


def serve_http(
    kb: str,
    model: str,
    config: ServeConfig,
    host: str,
    port: int,
    writable: bool,
    token: str | None,
    traces: bool,
) -> None:
    """Serves the tools over HTTP (streamable HTTP, path `PATH`) until Ctrl-C or SIGTERM.

    Raises:
        InputError: the address cannot be used, or knowledge base, model and index do not fit together.
    """
    _log_errors()
    with bound(host, port) as listening, exported(traces, by_libraries=True) as provider:
        service = Service(_knowledge(kb, model, config, writable), config, provider)
        app = create_tool_app(service, writable, token, own_hosts(host, config.hosts))
        log_address(kb, host, listening, PATH)
        with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises Ctrl-C again after the last requests
            http_server(app, config).run(sockets=[listening])


def _log_errors() -> None:
    """Logs errors of libraries to standard error. Without this handler, `mcp` would add one that logs every record."""
    lines = logging.StreamHandler()
    lines.setLevel(logging.ERROR)
    lines.addFilter(lambda record: not record.name.startswith("realm"))  # the command line logs these records
    logging.getLogger().addHandler(lines)


def _knowledge(kb: str, model: str, config: ServeConfig, writable: bool) -> LivingKnowledge:
    knowledge = LivingKnowledge(kb, model, config)
    if writable:
        knowledge.get_ready_to_write()
    return knowledge


def create_tool_app(
    service: Service, writable: bool, token: str | None = None, hosts: Iterable[str] | None = None
) -> Middleware:
    """The tools as an ASGI application.

    Args:
        service: the service that answers.
        writable: whether there is a tool that adds documents.
        token: clients must send this token. If None, everybody may use the tools.
        hosts: accepted values of the Host header, and of the host in the Origin header. If None, every host is accepted.
    """
    tools = tool_server(service, writable)
    app = tools.streamable_http_app(
        streamable_http_path=PATH,
        json_response=True,
        stateless_http=True,
        max_request_body_size=BODY_BYTES,
        transport_security=_security(hosts),
    )

    @contextlib.asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        async with service.running(writable), tools.session_manager.run():
            yield

    app.router.lifespan_context = lifespan
    posts = _only_posts(app)
    guarded = posts if token is None else _with_token(posts, token)
    config = service.config
    return Middleware(guarded, config.seconds, hosts, service.metrics.request)


def _security(hosts: Iterable[str] | None) -> TransportSecuritySettings:
    """The checks of the Host and Origin headers. A web page of another host cannot use the tools through a browser."""
    if hosts is None:
        return TransportSecuritySettings(enable_dns_rebinding_protection=False)
    names = [f"[{name}]" if ":" in name else name for name in hosts]
    return TransportSecuritySettings(
        allowed_hosts=[*names, *(f"{name}:*" for name in names)],
        allowed_origins=[
            f"{scheme}://{name}{port}"
            for name in names
            for scheme in ("http", "https")
            for port in ("", ":*")
        ],
    )


def _only_posts(app: ASGIApp) -> ASGIApp:
    """Refuses all requests but POST. A GET would open a stream that never ends, and these tools send nothing unasked."""

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] != "POST":
            await problem(405, "these tools take only POST", {"Allow": "POST"})(scope, receive, send)
            return
        await app(scope, receive, send)

    return checked


def _with_token(app: ASGIApp, token: str) -> ASGIApp:
    """Refuses requests without the token."""
    expected = token.encode()

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        scheme, _, shown = dict(scope.get("headers", ())).get(b"authorization", b"").partition(b" ")
        known = scheme.lower() == b"bearer" and hmac.compare_digest(shown.strip(), expected)
        if scope["type"] == "http" and not known:
            refused = problem(
                401,
                "these tools need the server's token: Authorization: Bearer TOKEN",
                {"WWW-Authenticate": "Bearer"},
            )
            await refused(scope, receive, send)
            return
        await app(scope, receive, send)

    return checked


def _readable_errors(tool: Callable[..., Awaitable[Result]]) -> Callable[..., Awaitable[Result]]:
    """Turns errors with a message for clients of the REST API into errors whose message the agent gets."""

    @functools.wraps(tool)
    async def run(**arguments: Any) -> Result:
        try:
            return await tool(**arguments)
        except Exception as error:
            explained = from_error(error)
            if explained.status_code == 500:  # a defect: the agent gets no details
                raise
            raise ToolError(json.loads(bytes(explained.body))["detail"]) from None

    return run


class _Tools(MCPServer[Any]):
    """Explains wrong arguments as the REST API does. The library would ignore unknown names, such as a misspelled `where`."""

    async def call_tool(self, name: str, arguments: dict[str, Any], context: Any = None) -> Any:
        known = next(
            (one.input_schema["properties"] for one in await self.list_tools() if one.name == name), None
        )
        unknown = [one for one in arguments if known is not None and one not in known]
        if unknown:
            raise ToolError(
                f"{name} has no argument {shortened(', '.join(map(repr, unknown)))}; it has {', '.join(known or ())}"
            )
        try:
            return await super().call_tool(name, arguments, context)
        except ToolError as error:
            if not isinstance(error.__cause__, ValidationError):
                raise
            wrong = [{**one, "loc": ("arguments", *one["loc"])} for one in error.__cause__.errors()]
            raise ToolError(wrong_input(wrong)) from None


def tool_server(service: Service, writable: bool) -> MCPServer[Any]:
    """The tools, without a transport; `service` must be running while a tool is called."""
    server = _Tools(
        "realm",
        title="Documents with evidence",
        version=__version__,
        instructions=INSTRUCTIONS,
        log_level="ERROR",
    )

    @server.tool(annotations=READS)
    @_readable_errors
    async def search(
        question: Annotated[schemas.Text, Field(description="A question, or words to search for")],
        method: Ranking = None,
        where: Where = None,
        top_k: Annotated[int, Field(ge=1, le=MOST_RETRIEVED, description="Number of passages")] = 5,
    ) -> schemas.HitsOut:
        """Finds the best passages for a question, with their texts, titles and documents, the best passage first."""
        kind = Kind("retrieve", method or service.knowledge.method, top_k, where=where)
        (done,) = await service.all_of(kind, [question])
        return schemas.HitsOut.model_validate(hits_of(question, done))

    @server.tool(annotations=READS)
    @_readable_errors
    async def answer(
        question: Annotated[
            schemas.Text, Field(description="A question whose answer is a short part of a document")
        ],
        method: Ranking = None,
        where: Where = None,
        top_k: Annotated[
            int | None, Field(ge=1, le=MOST_READ, description="Number of passages to read; null: the default")
        ] = None,
    ) -> schemas.AnswersOut:
        """Answers a question with short spans of the documents. Each answer has its probability and its passage, in which the \
answer is `text[start:end]`. If `found` is false, no answer is reliable, and the best answer is a guess."""
        read = top_k or service.config.read
        kind = Kind("answer", method or service.knowledge.method, read, where=where)
        (done,) = await service.all_of(kind, [question])
        return cast(schemas.AnswersOut, answers_of(question, done))

    @server.tool(annotations=READS)
    @_readable_errors
    async def read_passage(
        id: Annotated[str, Field(description="Id of a passage, from the result of another tool")],
    ) -> schemas.WholePassageOut:
        """Returns the text of a passage, its document, and the ids of the previous and the next passage of this document."""
        found = await asyncio.to_thread(responses.whole_passage_json, service.knowledge.current, id)
        return schemas.WholePassageOut.model_validate(found)

    if writable:

        @server.tool(annotations=WRITES)
        @_readable_errors
        async def add(
            documents: Annotated[
                list[schemas.DocumentIn],
                Field(
                    min_length=1,
                    max_length=MOST_DOCUMENTS,
                    description="Documents; a document replaces the document with the same id",
                ),
            ],
        ) -> schemas.AddedOut:
            """Adds documents, all or none. When the result arrives, the documents are on disk and can be found."""
            return schemas.AddedOut.model_validate(await service.add(documents))

    return server
