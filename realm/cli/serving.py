"""`realm serve`: the REST API and the web page; `realm mcp`: tools for agents."""

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from realm.cli.arguments import Commands, Parser, add_command, settings
from realm.errors import InputError

TOKEN = "REALM_TOKEN"
READ_TOKEN = "REALM_READ_TOKEN"
SHORTEST_TOKEN = 16
MCP_HOST = "127.0.0.1"
MCP_PORT = 8001


def add_commands(commands: "Commands[Parser]") -> None:
    """Declares the commands."""
    serve = add_command(
        commands,
        _serve,
        "serve answers, passages and training curves through a REST API and a web page",
        "realm serve --kb kb --model models/qa --runs models",
        section="serve",
    )
    serve.add_kb()
    serve.add_model()
    serve.add_reader("span reader to use instead of that of the model")
    serve.add_argument(
        "--host", metavar="HOST", default="127.0.0.1", help="address to listen on (default: %(default)s)"
    )
    serve.add_argument(
        "--port",
        metavar="PORT",
        type=_port,
        default=8000,
        help="port to listen on; 0: any free port (default: %(default)s)",
    )
    serve.add_argument("--runs", metavar="FOLDER", help="show the training runs in this folder")
    serve.add_switch(
        "--writable",
        f"allow clients that send the token in {TOKEN} or --token-file to add and delete documents, and to send feedback",
    )
    serve.add_argument("--token-file", metavar="FILE", help="file with the token for --writable")
    serve.add_switch(
        "--private",
        f"answer only clients that send the token in {READ_TOKEN} or --read-token-file, or the token for --writable",
    )
    serve.add_argument("--read-token-file", metavar="FILE", help="file with the token for --private")
    _add_traces(serve)

    mcp = add_command(
        commands,
        _mcp,
        "serve the tools search, answer and read_passage to agents through the Model Context Protocol, over standard input "
        "and output or over HTTP",
        "realm mcp --kb kb --model models/qa",
        section="serve",
    )
    mcp.add_kb()
    mcp.add_model()
    mcp.add_reader("span reader to use instead of that of the model")
    mcp.add_switch("--http", "serve over HTTP (path /mcp) instead of standard input and output")
    mcp.add_argument(
        "--host", metavar="HOST", help=f"with --http: address to listen on (default: {MCP_HOST})"
    )
    mcp.add_argument(
        "--port",
        metavar="PORT",
        type=_port,
        help=f"with --http: port to listen on; 0: any free port (default: {MCP_PORT})",
    )
    mcp.add_switch(
        "--writable",
        f"offer the tool add, which adds documents; with --http, clients must send the token in {TOKEN} or --token-file",
    )
    mcp.add_switch(
        "--private", f"with --http: answer only clients that send the token in {TOKEN} or --token-file"
    )
    mcp.add_argument("--token-file", metavar="FILE", help="file with the token for --private and --writable")
    _add_traces(mcp)


def _add_traces(parser: Parser) -> None:
    parser.add_switch(
        "--traces",
        "send OpenTelemetry traces to the collector that the environment variable OTEL_EXPORTER_OTLP_ENDPOINT names "
        "(default: http://localhost:4318); needs realm-lm[otel]",
    )


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: give a number from 0 to 65535")
    return int(text)


def _serve(args: argparse.Namespace) -> None:
    token = _token("--writable", args.writable, "--token-file", args.token_file, TOKEN)
    read_token = _token("--private", args.private, "--read-token-file", args.read_token_file, READ_TOKEN)
    with _extra("serve", "realm serve"):
        from realm.serve.server import serve
        from realm.serve.settings import ServeConfig, Tokens

    runs = Path(args.runs) if args.runs is not None else None
    config, address, tokens = settings(args, ServeConfig), (args.host, args.port), Tokens(token, read_token)
    _check_traces(args)
    serve(args.kb, args.model, config, address, tokens, runs, args.traces)


def _check_traces(args: argparse.Namespace) -> None:
    """Raises an InputError if traces are wanted, but the extra for traces is missing."""
    if args.traces:
        with _extra("otel", f"realm {args.called} --traces"):
            import opentelemetry.exporter.otlp.proto.http.trace_exporter  # noqa: F401


def _mcp(args: argparse.Namespace) -> None:
    if not args.http and (
        given := [
            flag
            for flag in ("host", "port", "private", "token_file")
            if getattr(args, flag) not in (None, False)
        ]
    ):
        raise InputError(f"--{given[0].replace('_', '-')} can only be used with --http: add --http")
    needs = "--private" if args.private else "--writable"
    token = _token(
        needs, args.http and (args.private or args.writable), "--token-file", args.token_file, TOKEN
    )
    with _extra("mcp", "realm mcp"):
        from realm.serve.mcp import serve_http, serve_stdio
        from realm.serve.settings import ServeConfig

    config = settings(args, ServeConfig)
    _check_traces(args)
    if not args.http:
        serve_stdio(args.kb, args.model, config, args.writable, args.traces)
        return
    host, port = args.host or MCP_HOST, MCP_PORT if args.port is None else args.port
    serve_http(args.kb, args.model, config, host, port, args.writable, token, args.traces)


@contextmanager
def _extra(name: str, command: str) -> Iterator[None]:
    """Turns a missing package of an extra into an InputError."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in ("realm", "torch"):
            raise
        raise InputError(
            f"`{command}` needs {error.name}: install it with `pip install 'realm-lm[{name}]'`"
        ) from None


def _token(flag: str, given: bool, file_flag: str, file: str | None, variable: str) -> str | None:
    """The token that a flag requires, from a file or an environment variable; None if the flag is not given."""
    if not given:
        if file is not None:
            raise InputError(f"{file_flag} needs {flag}: add {flag}")
        return None
    if file is not None:
        path = Path(file)
        if not path.is_file():
            raise InputError(f"{file_flag} {path} is not a file")
        token = path.read_text(encoding="utf-8", errors="replace").strip()
    else:
        token = os.environ.get(variable, "").strip()
    if len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise InputError(
            f"{flag} needs a token of {SHORTEST_TOKEN} or more ASCII characters in {variable} or {file_flag}: "
            f"export {variable}=$(openssl rand -hex 16)"
        )
    return token
