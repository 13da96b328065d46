"""`realm serve`: the REST API and the web page."""

import argparse
import os
from pathlib import Path

from realm.cli.arguments import Commands, Parser, add_command, add_kb, add_model, add_reader, settings
from realm.errors import InputError

TOKEN = "REALM_TOKEN"
READ_TOKEN = "REALM_READ_TOKEN"
SHORTEST_TOKEN = 16


def add_commands(commands: "Commands[Parser]") -> None:
    """Declares the command."""
    serve = add_command(
        commands,
        "serve",
        _serve,
        "serve answers, passages and training curves through a REST API and a web page",
        "realm serve --kb kb --model models/qa --runs models",
        section="serve",
    )
    add_kb(serve)
    add_model(serve)
    add_reader(serve, "span reader to use instead of that of the model")
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
    serve.add_argument(
        "--writable",
        action="store_true",
        help=f"allow clients that send the token in {TOKEN} or --token-file to add and delete documents, and to send feedback",
    )
    serve.add_argument("--token-file", metavar="FILE", help="file with the token for --writable")
    serve.add_argument(
        "--private",
        action="store_true",
        help=f"answer only clients that send the token in {READ_TOKEN} or --read-token-file, or the token for --writable",
    )
    serve.add_argument("--read-token-file", metavar="FILE", help="file with the token for --private")


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: give a number from 0 to 65535")
    return int(text)


def _serve(args: argparse.Namespace) -> None:
    token = _token("--writable", args.writable, "--token-file", args.token_file, TOKEN)
    read_token = _token("--private", args.private, "--read-token-file", args.read_token_file, READ_TOKEN)
    try:
        from realm.serve.server import serve
        from realm.serve.settings import ServeConfig
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in ("realm", "torch"):
            raise
        raise InputError(
            f"`realm serve` needs {error.name}: install it with `pip install 'realm-lm[serve]'`"
        ) from None

    runs = Path(args.runs) if args.runs is not None else None
    serve(args.kb, args.model, settings(args, ServeConfig), args.host, args.port, token, runs, read_token)


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
