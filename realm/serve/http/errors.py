"""Errors as problem+json (RFC 9457). `detail` is the error with its values and a way to solve the problem."""

import errno
import math
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.routing import Match, Mount

from realm.errors import DamagedError, RealmError, WriteFailed, error_number
from realm.serve.batching import Busy, NotReady
from realm.serve.feedback import FeedbackFull
from realm.store.fields.filters import FilterError
from realm.store.tables.table import ChangedMeanwhile
from realm.workspace.living import UnknownDocument, UnknownPassage

MEDIA_TYPE = "application/problem+json"
_METHODS = ("DELETE", "GET", "PATCH", "POST", "PUT")
_FULL = (errno.ENOSPC, errno.EDQUOT)
_BUSY = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class Problem(BaseModel):
    """The reason why a request was refused."""

    type: str = "about:blank"
    title: str
    """The reason phrase of the status."""
    status: int
    detail: str
    parameter: str | None = None
    """The part of the request that must be changed, such as `where`; missing if it is unknown."""


class OverLimit(HTTPException):
    """A value of a request is above a limit of the server."""

    def __init__(self, detail: str, parameter: str):
        super().__init__(422, detail)
        self.parameter = parameter


def problem(
    status: int, detail: str, headers: Mapping[str, str] | None = None, parameter: str | None = None
) -> JSONResponse:
    """The response for an error."""
    value = Problem(
        title=HTTPStatus(status).phrase, status=status, detail=" ".join(detail.split()), parameter=parameter
    )
    return JSONResponse(value.model_dump(exclude_none=True), status, dict(headers or {}), MEDIA_TYPE)


def from_error(error: Exception) -> JSONResponse:
    """The response for an exception; 500 for exceptions that are not listed here."""
    match error:
        case Busy():
            wait = max(1, math.ceil(error.seconds))
            return problem(429, f"too many requests wait: try again in {wait} s", {"Retry-After": str(wait)})
        case NotReady():
            ready = f"ranking by words has been in preparation for {error.seconds:.0f} s"
            return problem(
                503,
                f"no answer within the time limit: {ready}; try again later, or use method dense",
                {"Retry-After": "5"},
            )
        case TimeoutError():
            return problem(503, "no answer within the time limit: try again later", {"Retry-After": "5"})
        case UnknownDocument() | UnknownPassage():
            return problem(404, str(error))
        case ChangedMeanwhile():
            return problem(409, f"{error}")
        case WriteFailed() | OSError() if error_number(error) in _FULL:
            return problem(
                507,
                "the disk of the server is full: the change may not be saved, try again when space is free",
            )
        case WriteFailed():
            return problem(
                503, f"the server cannot write; the change may not be saved: {error}", {"Retry-After": "60"}
            )
        case OSError() if error.errno in _BUSY:
            return problem(
                503, "the server has no files or memory left: try again later", {"Retry-After": "5"}
            )
        case FeedbackFull():
            return problem(507, str(error))
        case FilterError():
            return problem(400, str(error), parameter="where")
        case DamagedError():
            return problem(500, "a file of the server is damaged: see the log of the server")
        case RealmError():
            return problem(400, str(error))
        case OverLimit():
            return problem(error.status_code, error.detail, parameter=error.parameter)
        case HTTPException():
            return problem(error.status_code, str(error.detail), error.headers)
    return problem(500, "internal error: see the log of the server")


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Entries for error responses with these statuses in an OpenAPI description."""
    return {
        status: {
            "description": HTTPStatus(status).phrase,
            "content": {MEDIA_TYPE: {"schema": Problem.model_json_schema()}},
        }
        for status in statuses
    }


def install(app: FastAPI) -> None:
    """Adds the exception handlers to the app, which send errors as problem+json."""

    async def ours(request: Request, error: Exception) -> JSONResponse:
        if isinstance(error, HTTPException) and (methods := _other_methods(request, error)):
            detail = f"{request.url.path} needs the method {methods}"
            return problem(405, detail, {"Allow": methods})
        return from_error(error)

    async def invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        wrong = error.errors()
        parameter = _parameter(wrong[0]) if len(wrong) == 1 else None
        return problem(422, wrong_input(wrong), parameter=parameter)

    async def of_the_system(request: Request, error: Exception) -> JSONResponse:
        response = from_error(error)
        if response.status_code == 500:
            raise error
        return response

    for fault in (OSError, DamagedError):
        app.add_exception_handler(fault, of_the_system)
    for kind in (RealmError, Busy, TimeoutError, HTTPException, Exception):
        app.add_exception_handler(kind, ours)
    app.add_exception_handler(RequestValidationError, invalid)


def _other_methods(request: Request, error: HTTPException) -> str:
    """The methods of an operation that was requested with another method: the router then looks for a file of the page."""
    if error.status_code not in (404, 405):
        return ""
    routes = [route for route in request.app.routes if not isinstance(route, Mount)]

    def known(method: str) -> bool:
        return any(route.matches({**request.scope, "method": method})[0] == Match.FULL for route in routes)

    return "" if known(request.method) else ", ".join(filter(known, _METHODS))


def wrong_input(errors: Sequence[Mapping[str, Any]]) -> str:
    """The first errors that pydantic found, in one line. The `loc` of an error begins with the part of the request."""
    return "; ".join(map(_sentence, errors[:5]))


def _sentence(error: Mapping[str, Any]) -> str:
    match error["type"]:
        # The only pattern requires a character that is not white space.
        case "string_pattern_mismatch" | "string_too_short":
            reason = "the text is empty or white space: write some text"
        case "string_too_long":
            most = error["ctx"]["max_length"]
            reason = f"{len(error['input'])} characters are too many: shorten the text to {most}"
        case "too_long":
            most, number = error["ctx"]["max_length"], error["ctx"]["actual_length"] or len(error["input"])
            reason = f"their number is {number}, but must be at most {most}"
        case "model_attributes_type" if error["loc"] == ("body",):
            reason = "send a JSON object, with the header Content-Type: application/json"
        case _:
            reason = str(error["msg"]).removeprefix("Value error, ")
    return f"{_parameter(error)}: {reason}"


def _parameter(error: Mapping[str, Any]) -> str:
    where, *place = error["loc"]  # body, query, path or header, and the place in it
    if error["type"] == "json_invalid":  # the place is a number of characters
        return str(where)
    return ".".join(map(str, place)) or str(where)
