"""The REST API and the web page over one living knowledge base. The page is static files, the API their only source.

`create_app` takes what it needs; nothing happens at import. A request goes Middleware -> route -> Service -> the snapshot of
the moment, and what it says comes from that one snapshot.
"""

import asyncio
import hmac
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from fastapi.staticfiles import StaticFiles
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException

from realm import __version__
from realm.errors import RealmError
from realm.qa.question_files import MAX_QUESTION_CHARACTERS
from realm.serve import schemas
from realm.serve.batching import Done
from realm.serve.client import NDJSON
from realm.serve.errors import documented, from_error, install
from realm.serve.middleware import Middleware
from realm.serve.runs import Run, read_metrics, runs
from realm.serve.service import WORDS_AT_START, Kind, Service
from realm.serve.settings import ServeConfig
from realm.text.corpus import Document
from realm.workspace.living import LivingKnowledge, UnknownDocument

PAGE = Path(__file__).parent / "page"
_log = logging.getLogger(__name__)


def create_app(
    knowledge: LivingKnowledge,
    config: ServeConfig,
    token: str | None = None,
    runs_folder: Path | None = None,
    hosts: set[str] | None = None,
    read_token: str | None = None,
) -> Middleware:
    """The server as an ASGI application.

    `token` is what writers must show, none: nobody may write; `runs_folder` holds the training runs to be shown; `hosts`
    are the names that the server may be called by, none: any; `read_token` is what readers must show, none: everybody may
    read. Whoever has `token` may read too.
    """
    service = Service(knowledge, config)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        # A server that is written to makes this anew with every change: unless it ranks by words by itself, it waits
        # until somebody does.
        ready = token is None and len(knowledge.current.kb) <= WORDS_AT_START
        if ready or knowledge.method != "dense":
            service.prepare_words()
        tasks = [asyncio.create_task(work()) for work in (service.batcher.work, service.watch)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    app = FastAPI(
        title="realm",
        version=__version__,
        description="Answers with evidence from a knowledge base that can be changed while it is served.",
        lifespan=lifespan,
        docs_url=None,  # both would load scripts from another host; the page has its own
        redoc_url=None,
        responses=documented(400, *([401] if read_token else []), 408, 413, 421, 422),
        separate_input_output_schemas=False,
        generate_unique_id_function=lambda route: route.name,  # the client's methods have the same names
    )
    install(app)
    readers = [Depends(_bearer("reading", read_token, token))] if read_token is not None else []
    api = APIRouter(prefix="/v1", dependencies=readers)
    _add_questions(api, service)
    _add_knowledge(api, knowledge)
    _add_changes(api, service, token)
    _add_runs(api, runs_folder)
    app.include_router(api)
    _add_watching(app, service, token is not None, runs_folder is not None, readers)
    app.mount("/", StaticFiles(directory=PAGE, html=True))
    return Middleware(app, config.body_bytes, config.seconds, hosts, service.metrics.request)


def _bearer(what: str, *tokens: str | None) -> Callable[..., None]:
    """A dependency that refuses whoever shows none of these tokens; where there are none, everybody."""
    known = [token.encode() for token in tokens if token is not None]

    def check(
        shown: Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))],
    ) -> None:
        if not known:
            raise HTTPException(403, "this server only reads: start it with --writable")
        if shown is None or not any(hmac.compare_digest(shown.credentials.encode(), one) for one in known):
            raise HTTPException(
                401,
                f"{what} needs the server's token: Authorization: Bearer TOKEN",
                {"WWW-Authenticate": "Bearer"},
            )

    return check


def _add_questions(api: APIRouter, service: Service) -> None:
    """Answers, passages and fillings."""
    config = service.config
    lines: dict[int | str, dict[str, Any]] = {200: {"content": {NDJSON: {"schema": {"type": "string"}}}}}

    @api.post(
        "/answer",
        response_model=schemas.AnswersOut | schemas.ManyAnswersOut,
        responses=lines | documented(429, 503),
    )
    async def answer(asked: schemas.AnswerRequest, request: Request) -> Response:
        """Answers with evidence. Many questions with `Accept: application/x-ndjson`: a line each, as they come."""
        read = _within(asked.top_k or config.read, config.most_read, "top_k")
        return await _respond(
            service, Kind("answer", asked.method or service.knowledge.method, read), asked, request, _answers
        )

    @api.post(
        "/retrieve",
        response_model=schemas.HitsOut | schemas.ManyHitsOut,
        responses=lines | documented(429, 503),
    )
    async def retrieve(asked: schemas.RetrieveRequest, request: Request) -> Response:
        """The best passages, unread."""
        k = _within(asked.top_k, config.most_retrieved, "top_k")
        return await _respond(
            service, Kind("retrieve", asked.method or service.knowledge.method, k), asked, request, _hits
        )

    @api.post("/fill", response_model=schemas.FilledOut, responses=documented(429, 503))
    async def fill(asked: schemas.FillRequest) -> Response:
        """Predictions for each [MASK], or the probability of a target, and which passages raised or lowered it."""
        (done,) = await service.all_of(Kind("fill", target=asked.target), [asked.sentence])
        snapshot, filled, ms = done.value
        times = {"queue": round(done.waited_ms, 2), "fill": round(ms, 2)}
        return JSONResponse(filled | {"index": schemas.index_out(snapshot), "ms": times})


def _answers(question: str, done: Done) -> dict[str, Any]:
    snapshot, answers = done.value
    return schemas.answers_out(answers, snapshot, done.waited_ms)


def _hits(question: str, done: Done) -> dict[str, Any]:
    snapshot, passages, ms = done.value
    times = {"queue": round(done.waited_ms, 2), "search": round(ms, 2)}
    return {"question": question, "passages": passages, "index": schemas.index_out(snapshot), "ms": times}


async def _respond(
    service: Service,
    kind: Kind,
    asked: schemas.Asked,
    request: Request,
    row: Callable[[str, Done], dict[str, Any]],
) -> Response:
    """One object for one question; for several an object of all, or a stream of lines if the client accepts it."""
    questions = asked.all
    _within(len(questions), service.config.questions, "the number of questions")
    if asked.questions is not None and NDJSON in request.headers.get("accept", ""):
        futures = await service.ask(kind, questions)
        return StreamingResponse(_stream(questions, futures, row, service.config.seconds), media_type=NDJSON)
    found = [
        row(question, done)
        for question, done in zip(questions, await service.all_of(kind, questions), strict=True)
    ]
    return JSONResponse(found[0] if asked.questions is None else {"results": found})


async def _stream(
    questions: list[str],
    futures: "list[asyncio.Future[Done]]",
    row: Callable[[str, Done], dict[str, Any]],
    seconds: float,
) -> AsyncIterator[str]:
    """A line per question, in their order. What fails ends the stream with a line `{"error": ...}`: the status is gone."""
    try:
        for question, future in zip(questions, futures, strict=True):
            try:
                done = await asyncio.wait_for(future, seconds)
            except Exception as error:
                if not isinstance(error, RealmError | TimeoutError):
                    _log.exception("amid a stream")
                yield json.dumps({"error": json.loads(bytes(from_error(error).body))}) + "\n"
                return
            yield json.dumps(row(question, done), ensure_ascii=False) + "\n"
    finally:
        for future in futures:  # a client that goes away leaves no work behind
            future.cancel()


def _add_knowledge(api: APIRouter, knowledge: LivingKnowledge) -> None:
    """Passages, documents and versions, to look at."""

    @api.get("/passages/{id}", response_model=schemas.WholePassageOut, responses=documented(404))
    async def passage(id: str) -> Response:
        """A passage by its id, and its neighbours in its document."""
        snapshot = knowledge.current
        number = await asyncio.to_thread(snapshot.number_of, id)
        if number is None:
            raise HTTPException(404, f"no passage has the id {id!r}")
        (found,) = await asyncio.to_thread(snapshot.kb.passages, [number])
        family = [one.id for one in await asyncio.to_thread(snapshot.passages_of, found.document_id)]
        place = family.index(found.id)
        return JSONResponse(
            {
                "id": found.id,
                "document": found.document_id,
                "title": found.title,
                "text": found.text,
                "previous": family[place - 1] if place else None,
                "next": family[place + 1] if place + 1 < len(family) else None,
            }
        )

    @api.get("/documents", response_model=schemas.DocumentsOut)
    async def documents(
        start: Annotated[int, Query(ge=0, le=2**53)] = 0,
        count: Annotated[int, Query(ge=1, le=1000)] = 100,
        prefix: Annotated[str, Query(max_length=1000)] = "",
    ) -> Response:
        """The documents from the `start`-th on; with a `prefix`, those whose id or title begins with it."""
        found = await asyncio.to_thread(knowledge.current.kb.documents, start, count + 1, prefix)
        following = start + count if len(found) > count else None
        return JSONResponse({"documents": [one._asdict() for one in found[:count]], "next": following})

    @api.get("/documents/{id:path}", response_model=schemas.DocumentOut, responses=documented(404))
    async def document(id: str) -> Response:
        """A document by its id, as its passages."""
        passages = await asyncio.to_thread(knowledge.current.passages_of, id)
        if not passages:
            raise UnknownDocument(f"no document has the id {id!r}")
        text = "\n".join(one.text for one in passages)
        ids = [one.id for one in passages]
        return JSONResponse({"id": id, "title": passages[0].title, "passages": ids, "text": text})

    @api.get("/examples", response_model=schemas.ExamplesOut)
    async def examples() -> Response:
        """A few questions that the documents answer, made from them by rules; none where the rules find none."""
        snapshot = knowledge.current
        return JSONResponse({"questions": await asyncio.to_thread(lambda: snapshot.examples)})

    @api.get("/versions", response_model=schemas.VersionsOut)
    async def versions() -> Response:
        """Versions of the passages and of their index on disk, and those in use."""
        rows = {
            name: [{"version": number, "created": created} for number, created in found]
            for name, found in (await asyncio.to_thread(knowledge.versions)).items()
        }
        return JSONResponse(rows | {"in_use": schemas.index_out(knowledge.current)})


def _add_changes(api: APIRouter, service: Service, token: str | None) -> None:
    """Adding and deleting documents, for those who have the token."""
    knowledge = service.knowledge
    only_writers, refused = (
        [Depends(_bearer("writing", token))],
        documented(401, 403, 404, 409, 429, 503, 507),
    )

    @api.post("/documents", response_model=schemas.AddedOut, dependencies=only_writers, responses=refused)
    async def add(body: schemas.DocumentsRequest) -> Response:
        """Adds or replaces documents, all or none; when this returns they are searchable, and on disk."""
        _within(len(body.documents), service.config.documents, "the number of documents")
        documents = [Document(one.title, one.text, _id_of(one)) for one in body.documents]
        result = await service.change(lambda: knowledge.add(documents))
        service.metrics.documents.labels("added").inc(result.added)
        service.metrics.documents.labels("replaced").inc(result.replaced)
        ids = [one.id for one in documents]
        return JSONResponse(result._asdict() | {"ids": ids, "index": schemas.index_out(knowledge.current)})

    @api.delete(
        "/documents/{id:path}",
        response_model=schemas.DeletedOut,
        dependencies=only_writers,
        responses=refused,
    )
    async def delete(id: str) -> Response:
        """Deletes a document; no answer that begins after this returns comes from it."""
        gone = await service.change(lambda: knowledge.delete(id))
        service.metrics.documents.labels("deleted").inc()
        return JSONResponse({"passages_removed": gone, "index": schemas.index_out(knowledge.current)})


def _add_watching(
    app: FastAPI, service: Service, writable: bool, shows_runs: bool, readers: list[Any]
) -> None:
    """How the server is, and what it counts."""
    config, knowledge = service.config, service.knowledge

    @app.get("/health", response_model=schemas.HealthOut)
    async def health() -> Response:
        """What is served, by which version, within which limits."""
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
                "index": schemas.index_out(snapshot),
                "method": knowledge.method,
                "words": snapshot.answerer.retriever.has_words,
                "queue": service.waiting,
                "writable": writable,
                "private": bool(readers),
                "runs": shows_runs,
                "limits": {
                    "read": config.read,
                    "most_read": config.most_read,
                    "most_retrieved": config.most_retrieved,
                    "questions": config.questions,
                    "documents": config.documents,
                    "body_bytes": config.body_bytes,
                    "seconds": config.seconds,
                    "question_characters": MAX_QUESTION_CHARACTERS,
                },
            }
        )

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        """The description of the API for people: a page over `/openapi.json`."""
        return FileResponse(PAGE / "docs.html")

    @app.get("/metrics", response_class=PlainTextResponse, dependencies=readers)
    async def metrics() -> Response:
        """Counters for Prometheus."""
        service.metrics.queue.set(service.waiting)
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)


def _add_runs(api: APIRouter, folder: Path | None) -> None:
    """The training runs of a folder, if any is shown."""

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
        """Training runs, the latest first."""
        rows = [
            {
                "name": run.name,
                "state": run.state,
                "training": run.state == "training",
                "changed": run.changed,
            }
            for run in await asyncio.to_thread(shown_runs)
        ]
        return JSONResponse({"runs": rows})

    @api.get("/runs/{name}", name="run", response_model=schemas.MetricsOut, responses=documented(404, 503))
    async def run_metrics(name: str, after: Annotated[int, Query(ge=0, le=2**53)] = 0) -> Response:
        """Metrics of a run behind byte `after`; `next` is where the ones after them begin, so that a page can follow."""
        run = next((run for run in await asyncio.to_thread(shown_runs) if run.name == name), None)
        if run is None:
            raise HTTPException(404, f"no run is called {name!r}")
        try:
            metrics = await asyncio.to_thread(read_metrics, run, after)
        except OSError:
            raise HTTPException(404, f"the run {name!r} has just ended, or gone: look again") from None
        state = {"state": run.state, "training": run.state == "training"}
        return JSONResponse(state | metrics._asdict())


def _id_of(document: schemas.DocumentIn) -> str:
    name = document.id or document.title
    if not name.strip():
        raise RealmError("a document has neither an id nor a title: give it one")
    return name


def _within(value: int, most: int, name: str) -> int:
    if value > most:
        raise HTTPException(422, f"{name} is {value}, the limit is {most}")
    return value
