"""The server process: binds the port, loads the knowledge base, logs the address, and ends after Ctrl-C or SIGTERM."""

import contextlib
import logging
import socket
from pathlib import Path

from realm.errors import InputError
from realm.serve.app import create_app
from realm.serve.http.connections import BACKLOG, http_server
from realm.serve.http.middleware import own_hosts
from realm.serve.http.tracing import exported
from realm.serve.settings import ServeConfig, Tokens
from realm.workspace.living import LivingKnowledge

_log = logging.getLogger(__name__)


def serve(
    kb: str,
    model: str,
    config: ServeConfig,
    address: tuple[str, int],
    tokens: Tokens,
    runs: Path | None = None,
    traces: bool = False,
) -> None:
    """Serves on the address, a host and a port, until Ctrl-C or SIGTERM. `runs` is a folder of training runs to show.

    With `traces`, traces are sent to a collector (`realm.serve.http.tracing`).

    Raises:
        InputError: the address cannot be used, or knowledge base, model and index do not fit together.
    """
    if runs is not None and not runs.is_dir():
        raise InputError(f"--runs {runs} is not a folder")
    host, port = address
    with bound(host, port) as listening, exported(traces) as provider:
        knowledge = LivingKnowledge(kb, model, config)
        if tokens.write is not None:
            knowledge.get_ready_to_write()
        app = create_app(knowledge, config, tokens, runs, own_hosts(host, config.hosts), provider)
        log_address(kb, host, listening)
        with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises Ctrl-C again after the last requests
            http_server(app, config).run(sockets=[listening])


def log_address(kb: str, host: str, listening: socket.socket, path: str = "/") -> None:
    """Logs what is served, and the address."""
    shown = f"[{host}]" if ":" in host else host
    _log.info("serving %s on http://%s:%d%s", kb, shown, listening.getsockname()[1], path)


def bound(host: str, port: int) -> socket.socket:
    """A socket that listens on the address.

    Raises:
        InputError: the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        # The part in brackets is the address, which the message below already contains.
        reason = str(getattr(error, "strerror", None) or error).partition(" (")[0]
        raise InputError(
            f"cannot listen on {host} port {port}: {reason}; choose another --host or --port"
        ) from None
    # Accepted connections inherit TCP_NODELAY. asyncio sets TCP_NODELAY only if the protocol of the listener is explicitly TCP,
    # but the protocol of this listener is 0. Without TCP_NODELAY, the body of a response is sent only after the client has
    # acknowledged the head of the response, and clients delay this acknowledgement by 40 ms.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening
