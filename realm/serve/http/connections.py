"""Limits on connections and request heads.

The app receives a request when the head of the request is complete. This module limits the time and the size of a head, the
number of open connections, and the time until a client reads a response. The number of connections stays below the process's
limit of open files, so that the listener and the knowledge base can still open files.
"""

import asyncio
import functools
import math
import resource
import socket
from typing import Any, Literal, cast

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from realm.serve.http.errors import problem
from realm.serve.http.logs import limited_logs
from realm.serve.http.middleware import HEAD_BYTES, RAW_HEADERS
from realm.serve.settings import CONNECTIONS, HEAD_SECONDS, WRITE_SECONDS, ServeConfig

BACKLOG = 2048
"""Largest number of connections that the system queues until they are accepted."""
_AT_ONCE = 16
"""Connections accepted per turn of the event loop. The number is low, because closing an old connection takes a few turns."""


def http_server(app: Any, config: ServeConfig) -> uvicorn.Server:
    """The uvicorn server of the app. When the server stops, it first answers the requests that it has received.

    After `WRITE_SECONDS`, clients that have not sent a whole request or not read a whole response are disconnected. Otherwise a
    single client could prevent the end of the server.
    """
    connection = functools.partial(Connection, seconds=config.seconds, most=most_connections())
    return _Server(
        uvicorn.Config(
            app,
            http=cast(type[asyncio.Protocol], connection),
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            lifespan="on",
            backlog=_AT_ONCE,
            h11_max_incomplete_event_size=HEAD_BYTES,
            timeout_graceful_shutdown=math.ceil(WRITE_SECONDS),
        )
    )


def most_connections() -> int:
    """Largest number of open connections: `CONNECTIONS`, but at most half of the files that this process may open."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return CONNECTIONS if files == resource.RLIM_INFINITY else max(1, min(CONNECTIONS, files // 2))


class _Server(uvicorn.Server):
    """uvicorn with a limit on log lines, and a limit on connections that are accepted in one turn of the event loop."""

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serves until it is stopped."""
        with limited_logs():
            await super().serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to listen. asyncio accepts up to `backlog` connections per turn; the system queues up to `BACKLOG`."""
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(BACKLOG)


class Connection(H11Protocol):
    """A connection that limits the time in which the client sends a request and the time in which it reads a response."""

    def __init__(self, *args: Any, seconds: float, most: int, **more: Any):
        super().__init__(*args, **more)
        self._seconds, self._most = seconds, most
        self._awaited: Literal["", "head", "body", "reader"] = ""
        """What the server waits for: the head, the body, or the reading of the response; "" while a response is computed."""
        self._since = 0.0
        """Time since which the server waits for `_awaited`, on the clock of the event loop."""
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._set_timer()
        if len(self.connections) > self._most:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._set_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._set_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._set_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._set_timer()

    def send_400_response(self, msg: str) -> None:
        """Refuses a request head that is not valid HTTP."""
        if len(self.conn.trailing_data[0]) > HEAD_BYTES:
            self._refuse(431, f"the head of the request is longer than {HEAD_BYTES} bytes")
        else:
            self._refuse(400, "the request is not valid HTTP/1.1")

    def _set_timer(self) -> None:
        """Sets the timer for what the server waits for next."""
        if self.flow.write_paused or self.transport.is_closing():
            awaited: Literal["", "head", "body", "reader"] = "reader"
        elif self.conn.their_state is h11.IDLE:
            awaited = "head"
        else:
            awaited = "body" if self.conn.their_state is h11.SEND_BODY else ""
        if awaited == self._awaited:
            return
        self._stop_timer()
        self._awaited, self._since = awaited, self.loop.time()
        if awaited == "head":
            self._timer = self.loop.call_later(HEAD_SECONDS, self._head_is_late)
        elif awaited == "reader":
            self._timer = self.loop.call_later(self._seconds, self.transport.abort)
        # The middleware limits the time of the body.

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _head_is_late(self) -> None:
        if self.conn.trailing_data[0]:
            self._refuse(408, f"the head of the request took longer than {HEAD_SECONDS:g} s")
        else:
            self._close()

    def _make_room(self) -> None:
        """Closes the connection that has waited longest for its client. If no connection waits, this connection is closed."""
        connected = [one for one in self.connections if isinstance(one, Connection) and not one._ended]
        if len(connected) <= self._most:
            return
        waiting = [one for one in connected if one._awaited and one is not self]
        longest = min(waiting, key=lambda one: one._since, default=self)
        if longest._awaited == "head" and longest is not self and not longest.conn.trailing_data[0]:
            longest._close()
        else:
            longest._refuse(503, f"{self._most} connections are open, which is the limit: try again later")

    @property
    def _ended(self) -> bool:
        """Whether only the socket is left to close."""
        return self.transport.is_closing() and not self.transport.get_write_buffer_size()

    def _refuse(self, status: int, detail: str) -> None:
        """Sends an error response, unless a response has already begun, and closes the connection."""
        refused = problem(
            status,
            detail,
            {"Connection": "close", "Retry-After": "5"} if status == 503 else {"Connection": "close"},
        )
        head = h11.Response(
            status_code=status,
            headers=[*self.server_state.default_headers, *refused.raw_headers, *RAW_HEADERS],
        )
        try:
            parts = [self.conn.send(head), self.conn.send(h11.Data(data=bytes(refused.body)))]
            parts.append(self.conn.send(h11.EndOfMessage()))
        except h11.LocalProtocolError:  # a response has already begun
            self.transport.abort()
            return
        for part in parts:
            self.transport.write(part or b"")
        self._close()

    def _close(self) -> None:
        self.transport.close()
        self._set_timer()
