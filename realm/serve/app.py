"""The REST API of a knowledge base that can change, and the web page, whose static files use the API.

A request passes through Middleware, a route and Service to the current snapshot. All parts of a response come from the same
snapshot.
"""

import asyncio
import hmac
import json
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from fastapi.staticfiles import StaticFiles
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.convertors import Convertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from realm import __version__
from realm.qa.question_files import MAX_QUESTION_CHARACTERS
from realm.serve import responses, schemas
from realm.serve.batching import Done
from realm.serve.client import NDJSON
from realm.serve.feedback import Feedback
from realm.serve.http.errors import OverLimit, documented, from_error, install
from realm.serve.http.middleware import Middleware
from realm.serve.http.tracing import traced
from realm.serve.runs import Run, read_metrics, runs
from realm.serve.service import Kind, Service, answers_of, hits_of
from realm.serve.settings import (
    BODY_BYTES,
    LONGEST_IN_ADDRESS,
    MOST_DOCUMENTS,
    MOST_READ,
    MOST_RETRIEVED,
    ServeConfig,
    Tokens,
)
from realm.workspace.living import LivingKnowledge, UnknownDocument

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

PAGE = Path(__file__).parent / "page"
_log = logging.getLogger(__name__)


class _DocumentId(Convertor[str]):
    """Any text. In the convertor `path` of Starlette, no line break is part of the text."""

    regex = "(?s:.*)"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("document", _DocumentId())


def create_app(
    knowledge: LivingKnowledge,
    config: ServeConfig,
    tokens: Tokens,
    runs_folder: Path | None = None,
    hosts: set[str] | None = None,
    traces: "TracerProvider | None" = None,
) -> ASGIApp:
    """The server as an ASGI application.

    Args:
        knowledge: the knowledge base to serve.
        config: settings and limits.
        tokens: tokens that clients must send.
        runs_folder: folder of the training runs to show. If None, no runs are shown.
        hosts: accepted values of the Host header. If None, every host is accepted.
        traces: provider of tracers for requests and questions. If None, nothing is traced.
    """
    service = Service(knowledge, config, traces)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with service.running(writable=tokens.write is not None):
            yield

    app = FastAPI(
        title="realm",
        version=__version__,
        description="Answers questions with evidence from a knowledge base that can change while it is served.",
        lifespan=lifespan,
        docs_url=None,  # FastAPI's pages would load scripts from another host; /docs is a page of this package
        redoc_url=None,
        responses=documented(400, *([401] if tokens.read else []), 408, 413, 421, 422),
        separate_input_output_schemas=False,
        # The operations have the same names as the methods of `realm.serve.client.Client`.
        generate_unique_id_function=lambda route: route.name,
    )
    install(app)
    readers = [] if tokens.read is None else [Depends(_require_token("reading", tokens.read, tokens.write))]
    api = APIRouter(prefix="/v1", dependencies=readers)
    _add_questions(api, service)
    _add_knowledge(api, knowledge, config.name or _corpus_name(knowledge.folder))
    _add_changes(api, service, tokens.write)
    _add_runs(api, runs_folder)
    app.include_router(api)
    _add_state(app, service, tokens.write is not None, runs_folder is not None, readers)
    app.mount("/", StaticFiles(directory=PAGE, html=True))
    return traced(Middleware(app, config.seconds, hosts, service.metrics.request), traces)


def _require_token(what: str, *tokens: str | None) -> Callable[..., None]:
    """A FastAPI dependency that refuses requests without one of these tokens, or all requests if all tokens are None."""
    known = [token.encode() for token in tokens if token is not None]

    def check(
        shown: Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))],
    ) -> None:
        if not known:
            raise HTTPException(403, "this server is read-only: start it with --writable")
        if shown is None or not any(hmac.compare_digest(shown.credentials.encode(), one) for one in known):
            raise HTTPException(
                401,
                f"{what} needs the server's token: Authorization: Bearer TOKEN",
                {"WWW-Authenticate": "Bearer"},
            )

    return check


def _add_questions(api: APIRouter, service: Service) -> None:
    """Adds the routes of questions: answers, passages and masked sentences."""
    config = service.config
    lines: dict[int | str, dict[str, Any]] = {200: {"content": {NDJSON: {"schema": {"type": "string"}}}}}

    @api.post(
        "/answer",
        response_model=schemas.AnswersOut | schemas.ManyAnswersOut,
        responses=lines | documented(429, 503),
    )
    async def answer(body: schemas.AnswerRequest, request: Request) -> Response:
        """Answers questions with evidence. With `Accept: application/x-ndjson`, the response has a line per question."""
        read = _check_limit(body.top_k or config.read, MOST_READ, "top_k", "top_k")
        return await _respond(
            service,
            Kind("answer", body.method or service.knowledge.method, read, where=body.where),
            body,
            request,
            answers_of,
        )

    @api.post(
        "/retrieve",
        response_model=schemas.HitsOut | schemas.ManyHitsOut,
        responses=lines | documented(429, 503),
    )
    async def retrieve(body: schemas.RetrieveRequest, request: Request) -> Response:
        """Finds the best passages for questions, without searching the passages for answers."""
        k = _check_limit(body.top_k, MOST_RETRIEVED, "top_k", "top_k")
        return await _respond(
            service,
            Kind("retrieve", body.method or service.knowledge.method, k, where=body.where),
            body,
            request,
            hits_of,
        )

    @api.post("/fill", response_model=schemas.FilledOut, responses=documented(429, 503))
    async def fill(body: schemas.FillRequest) -> Response:
        """Predicts each [MASK], or computes the probability of a target word, and the effect of each passage on the result."""
        (done,) = await service.all_of(Kind("fill", target=body.target), [body.sentence])
        snapshot, filled, ms = done.value
        times = {"queue": round(done.waited_ms, 2), "fill": round(ms, 2)}
        return JSONResponse(filled | {"index": responses.index_json(snapshot), "ms": times})

    @api.get("/examples", response_model=schemas.ExamplesOut, responses=documented(429, 503))
    async def examples() -> Response:
        """Returns a few questions about the documents; the list may be empty."""
        (done,) = await service.all_of(Kind("examples"), [""])
        return JSONResponse({"questions": done.value})


async def _respond(
    service: Service,
    kind: Kind,
    body: schemas.Asked,
    request: Request,
    row: Callable[[str, Done], dict[str, Any]],
) -> Response:
    """The response: an object for one question; for several questions an object with all results, or NDJSON if accepted."""
    questions = body.all
    _check_limit(len(questions), service.config.questions, "the number of questions", "questions")
    if body.questions is not None and NDJSON in request.headers.get("accept", ""):
        futures = await service.ask(kind, questions)
        return StreamingResponse(_stream(questions, futures, row, service.config.seconds), media_type=NDJSON)
    found = [
        row(question, done)
        for question, done in zip(questions, await service.all_of(kind, questions), strict=True)
    ]
    return JSONResponse(found[0] if body.questions is None else {"results": found})


async def _stream(
    questions: list[str],
    futures: "list[asyncio.Future[Done]]",
    row: Callable[[str, Done], dict[str, Any]],
    seconds: float,
) -> AsyncIterator[str]:
    """One line per question, in order. After an error, the last line is `{"error": ...}`: the status is already sent."""
    try:
        for question, future in zip(questions, futures, strict=True):
            try:
                done = await asyncio.wait_for(future, seconds)
            except Exception as error:
                response = from_error(error)
                if response.status_code == 500:
                    _log.exception("error during a stream")
                yield json.dumps({"error": json.loads(bytes(response.body))}) + "\n"
                return
            yield json.dumps(row(question, done), ensure_ascii=False) + "\n"
    finally:
        for future in futures:  # after an error or a disconnection, the answers are not needed
            future.cancel()


def _add_knowledge(api: APIRouter, knowledge: LivingKnowledge, name: str) -> None:
    """Adds the routes that show passages, documents and versions."""

    @api.get("/passages/{id}", response_model=schemas.WholePassageOut, responses=documented(404))
    async def passage(id: str) -> Response:
        """Returns a passage by its id, with the ids of the previous and the next passage of the same document."""
        return JSONResponse(await asyncio.to_thread(responses.whole_passage_json, knowledge.current, id))

    @api.get("/documents", response_model=schemas.DocumentsOut, responses=documented(431))
    async def documents(
        start: Annotated[int, Query(ge=0, le=2**53)] = 0,
        count: Annotated[int, Query(ge=1, le=1000)] = 100,
        prefix: Annotated[str, Query(max_length=LONGEST_IN_ADDRESS)] = "",
        where: Annotated[str | None, Query(max_length=LONGEST_IN_ADDRESS)] = None,
    ) -> Response:
        """Lists documents from number `start` on.

        `prefix` limits the list to ids and titles that begin with this text, and `where` to documents that match this filter.
        """
        found = await asyncio.to_thread(knowledge.current.kb.documents, start, count + 1, prefix, where)
        following = start + count if len(found) > count else None
        return JSONResponse({"documents": [one._asdict() for one in found[:count]], "next": following})

    @api.get("/documents/{id:document}", response_model=schemas.DocumentOut, responses=documented(404))
    async def document(id: str) -> Response:
        """Returns a document by its id, with its passages."""
        passages = await asyncio.to_thread(knowledge.current.passages_of, id)
        if not passages:
            raise UnknownDocument(f"no document has the id {id!r}")
        text = "\n".join(one.text for one in passages)
        ids = [one.id for one in passages]
        fields = dict(passages[0].fields)
        return JSONResponse(
            {"id": id, "title": passages[0].title, "passages": ids, "text": text, "fields": fields}
        )

    @api.get("/corpus", response_model=schemas.CorpusOut)
    async def corpus() -> Response:
        """Returns the name and the size of the corpus, the titles of a few documents, and the fields with an example filter."""
        return JSONResponse(
            {"name": name} | await asyncio.to_thread(responses.corpus_json, knowledge.current)
        )

    @api.get("/versions", response_model=schemas.VersionsOut)
    async def versions() -> Response:
        """Lists the versions of the passages and of their index that are on disk, and the versions in use."""
        rows = {
            name: [{"version": number, "created": created} for number, created in found]
            for name, found in (await asyncio.to_thread(knowledge.versions)).items()
        }
        return JSONResponse(rows | {"in_use": responses.index_json(knowledge.current)})


def _add_changes(api: APIRouter, service: Service, token: str | None) -> None:
    """Adds the routes that add and delete documents, and store feedback; they require the token."""
    knowledge = service.knowledge
    only_writers, refused = (
        [Depends(_require_token("writing", token))],
        documented(401, 403, 404, 409, 429, 503, 507),
    )

    folder = knowledge.folder.resolve()
    default = folder.with_name(f"{folder.name}.feedback.jsonl")
    feedback_files = Feedback(Path(service.config.feedback or default))

    @api.post("/feedback", response_model=schemas.FeedbackOut, dependencies=only_writers, responses=refused)
    async def feedback(body: schemas.FeedbackRequest) -> Response:
        """Stores whether an answer is right or wrong, or a better answer, as a line of a question file."""
        passage = await asyncio.to_thread(knowledge.current.passage, body.passage)
        given = (body.question, body.verdict, passage, body.start, body.end)
        return JSONResponse((await asyncio.to_thread(feedback_files.add, *given))._asdict())

    @api.post("/documents", response_model=schemas.AddedOut, dependencies=only_writers, responses=refused)
    async def add(body: schemas.DocumentsRequest) -> Response:
        """Adds or replaces all documents or none. When the response arrives, the documents are on disk and can be found."""
        return JSONResponse(await service.add(body.documents))

    @api.delete(
        "/documents/{id:document}",
        response_model=schemas.DeletedOut,
        dependencies=only_writers,
        responses=refused,
    )
    async def delete(id: str) -> Response:
        """Deletes a document. When the response arrives, no new answer uses the document."""
        gone = await service.change(lambda: knowledge.delete(id))
        service.metrics.documents.labels("deleted").inc()
        return JSONResponse({"passages_removed": gone, "index": responses.index_json(knowledge.current)})


def _add_state(app: FastAPI, service: Service, writable: bool, shows_runs: bool, readers: list[Any]) -> None:
    """Adds the routes of the server's state: health, documentation and metrics."""
    config, knowledge = service.config, service.knowledge

    @app.get("/health", response_model=schemas.HealthOut)
    async def health() -> Response:
        """Returns the state, the version and the limits of the server."""
        snapshot = knowledge.current
        return JSONResponse(
            {
                "status": "ok" if knowledge.problem is None else "stale",
                "problem": knowledge.problem,
                "version": __version__,
                "model": Path(knowledge.model).name,
                "answers": snapshot.answerer.model.span_reader is not None,
                "passages": len(snapshot.kb),
                "documents": await asyncio.to_thread(lambda: snapshot.documents),
                "index": responses.index_json(snapshot),
                "method": knowledge.method,
                "words": snapshot.answerer.retriever.bm25_loaded,
                "queue": service.waiting,
                "writable": writable,
                "private": bool(readers),
                "runs": shows_runs,
                "limits": {
                    "read": config.read,
                    "most_read": MOST_READ,
                    "most_retrieved": MOST_RETRIEVED,
                    "questions": config.questions,
                    "documents": MOST_DOCUMENTS,
                    "body_bytes": BODY_BYTES,
                    "seconds": config.seconds,
                    "question_characters": MAX_QUESTION_CHARACTERS,
                },
            }
        )

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        """The documentation of the API: a page that shows `/openapi.json`."""
        return FileResponse(PAGE / "docs.html")

    @app.get("/metrics", response_class=PlainTextResponse, dependencies=readers)
    async def metrics() -> Response:
        """Returns the metrics of the server in the format of Prometheus."""
        service.metrics.queue.set(service.waiting)
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)


def _add_runs(api: APIRouter, folder: Path | None) -> None:
    """Adds the routes of training runs. Without a folder, the responses of these routes are 404."""

    def shown_runs() -> list[Run]:
        if folder is None:
            raise HTTPException(404, "no training runs are shown: start the server with --runs FOLDER")
        try:
            return runs(folder)
        except OSError as error:
            raise HTTPException(
                503, f"the folder of training runs cannot be read: {error.strerror}"
            ) from None

    @api.get("/runs", name="runs", response_model=schemas.RunsOut, responses=documented(404, 503))
    async def list_runs() -> Response:
        """Lists the training runs, latest first."""
        found = await asyncio.to_thread(shown_runs)
        rows = [{"name": run.name, "state": run.state, "changed": run.changed} for run in found]
        return JSONResponse({"runs": rows})

    @api.get(
        "/runs/{name:path}", name="run", response_model=schemas.MetricsOut, responses=documented(404, 503)
    )
    async def run_metrics(name: str, after: Annotated[int, Query(ge=0, le=2**53)] = 0) -> Response:
        """Returns the metrics of a run from byte `after` on; `next` is the value of `after` for the following request."""
        run = next((run for run in await asyncio.to_thread(shown_runs) if run.name == name), None)
        if run is None:
            raise HTTPException(404, f"no run has the name {name!r}")
        try:
            metrics = await asyncio.to_thread(read_metrics, run, after)
        except OSError:
            raise HTTPException(
                404, f"the run {name!r} has just ended or was removed: list the runs again"
            ) from None
        return JSONResponse({"state": run.state, **metrics._asdict()})


def _corpus_name(kb: Path) -> str:
    """The name of the folder of a knowledge base; if this name is `kb`, the name of the folder that contains it."""
    folder = kb.resolve()
    name = (folder.parent.name if folder.name == "kb" else folder.name) or folder.name
    return os.fsencode(name).decode("utf-8", "replace")


def _check_limit(value: int, most: int, name: str, parameter: str) -> int:
    """Refuses a value above a limit; `name` is the value in words, `parameter` its part of the request."""
    if value > most:
        raise OverLimit(f"{name} is {value}, but must be at most {most}", parameter)
    return value
