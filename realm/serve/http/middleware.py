"""Middleware for all requests and responses: checks the host, and the size and time of a body, and adds security headers.

If a client disconnects before its response is ready, the work on the response is cancelled. The middleware is plain ASGI and
not that of a framework, so that these checks come first.
"""

import asyncio
import ipaddress
import itertools
import time
from collections.abc import Callable, Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from realm.serve.http.errors import problem
from realm.serve.settings import BODY_BYTES

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-cache",
}
RAW_HEADERS = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
HEAD_BYTES = 16_384
"""Largest size of a request head (first line and headers)."""
GONE = 499
"""Status in the metrics of a request whose client disconnected, as in nginx."""


class Middleware:
    """Refuses requests that are too long, too slow or for other hosts, adds headers, and reports each status and time."""

    def __init__(
        self,
        app: ASGIApp,
        seconds: float,
        hosts: Iterable[str] | None,
        watch: Callable[[Scope, int, float], None],
    ):
        """`hosts` are accepted values of the Host header; None: any value. `watch` is called with scope, status and seconds."""
        self._app, self._seconds, self._watch = app, seconds, watch
        self._hosts = None if hosts is None else {host.lower() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status, through = time.perf_counter(), 0, False
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # the HTTP server leaves out the body of the response

        async def send_with_headers(message: Message) -> None:
            nonlocal status, through
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *RAW_HEADERS]
            through = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        try:
            try:
                body = await self._body(scope, receive)
            except _Refused as error:
                await error.response(scope, receive, send_with_headers)
                return
            if body is None:
                status = GONE
                return
            left = asyncio.ensure_future(_disconnected(receive))
            answering = asyncio.ensure_future(self._app(scope, _receive_of(body, left), send_with_headers))
            try:
                await asyncio.wait((answering, left), return_when=asyncio.FIRST_COMPLETED)
                if answering.done() or through:
                    await answering
                else:
                    status = GONE
            finally:
                answering.cancel()
                left.cancel()
        except asyncio.CancelledError:  # the server stops, and `WRITE_SECONDS` have passed
            if not status:
                ends = problem(503, "the server is stopping", {"Connection": "close"})
                await ends(scope, receive, send_with_headers)
        finally:
            self._watch(scope, status or 500, time.perf_counter() - began)

    async def _body(self, scope: Scope, receive: Receive) -> bytes | None:
        """The whole body of a request; None if the client disconnects before the end of the body. Raises _Refused."""
        headers = dict(scope["headers"])
        host = _name(headers.get(b"host", b"").decode("latin-1"))
        if self._hosts is not None and host not in self._hosts:
            # Protection against DNS rebinding: a web page whose host name resolves to this machine could read from this server.
            raise _Refused(
                421, f"this server does not serve the host {host!r}: add the host to the setting `hosts`"
            )
        head = [scope.get("raw_path") or b"", scope["query_string"], *itertools.chain(*scope["headers"])]
        if sum(map(len, head)) > HEAD_BYTES:
            raise _Refused(431, f"the head of the request is longer than {HEAD_BYTES} bytes")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > BODY_BYTES:
            raise self._too_long()
        body = bytearray()
        try:
            async with asyncio.timeout(self._seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    body += message.get("body", b"")
                    if len(body) > BODY_BYTES:
                        raise self._too_long()
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            raise _Refused(408, f"the body took longer than {self._seconds:g} s") from None

    def _too_long(self) -> "_Refused":
        return _Refused(413, f"the body is longer than {BODY_BYTES} bytes")


class _Refused(Exception):
    """Refusal of a request before its body is read. The connection is then closed, because the body may still follow."""

    def __init__(self, status: int, detail: str):
        super().__init__(detail)
        self.response = problem(status, detail, {"Connection": "close"})


def own_hosts(address: str, more: Iterable[str]) -> set[str] | None:
    """Accepted hosts of a server at this address: names of the loopback, the address and `more`.

    None if all hosts are accepted, because the address is not a loopback address and `more` is empty.
    """
    names = {"localhost", "127.0.0.1", "::1"}
    try:
        loopback = address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:
        loopback = False
    return names | {address, *more} if loopback or more else None


async def _disconnected(receive: Receive) -> Message:
    """Waits until the client disconnects or the response is complete."""
    while (message := await receive())["type"] != "http.disconnect":
        pass
    return message


def _receive_of(body: bytes, left: "asyncio.Future[Message]") -> Receive:
    """An ASGI `receive` that first returns a body that was already read, and then waits until the client disconnects."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await asyncio.shield(left)
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def _name(host: str) -> str:
    """The Host header without its port, in lower case."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.rpartition(":")[0].lower() if ":" in host else host.lower()
