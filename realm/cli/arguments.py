"""Functions that all commands share: to declare a command, to add common flags, and to print results."""

import argparse
import json
import os
import re
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from realm.errors import InputError, way_out
from realm.files import write_json
from realm.ray_actors import EngineConfig
from realm.settings import read_config
from realm.text.corpus import PassagesConfig

T = TypeVar("T")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
Commands = argparse._SubParsersAction


class Parser(argparse.ArgumentParser):
    """An argument parser with one-line errors, in which --in WORKSPACE can replace the flags for the folders of a workspace."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._parts: dict[str, str] = {}
        """Flag -> name of the folder in a workspace."""
        self._required: list[str] = []
        """Flags of folders without which the command cannot run."""
        self._in: argparse.Action | None = None
        self._out_is_local = False
        """Whether --out cannot be an address on object storage."""
        self._written: list[str] = []
        """Names of the arguments that are files which the command writes."""
        self._made: list[argparse.Action] = []
        """Arguments that are folders which the command makes."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (see `{self.prog} --help`)")

    def add_part(self, flag: str, name: str, required: bool, metavar: str, help: str) -> None:
        """Declares the flag for a folder, and --in, which sets this flag to the folder `name` in a workspace."""
        if self._in is None:
            self._in = self.add_argument("--in", metavar="WORKSPACE", dest="workspace")
        needed = " (required without --in)" if required else ""
        self.add_argument(f"--{flag}", metavar=metavar, help=help + needed)
        self._parts[flag] = name
        self._required += [flag] if required else []
        self._in.help = f"workspace made by `realm fit`, or hf:OWNER/NAME; replaces {_flags(self._parts)}"

    def parse_known_args(  # type: ignore[override]
        self, args: Any = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parses the arguments; with --in, sets the flags for the folders of the workspace."""
        found, rest = super().parse_known_args(args, namespace)
        if rest and self._subparsers is None:  # the parser of the command knows the command for the message
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        self._refuse_empty(found)
        self._refuse_addresses(found)
        for name in ("out", *self._parts):
            value = getattr(found, name, None)
            # "." has no name beside which files can be written.
            if isinstance(value, str) and not Path(value).name:
                setattr(found, name, os.path.abspath(value))
                if not Path(os.path.abspath(value)).name:
                    self.error(f"argument --{name}: {value} is the whole file system")
        if self._in is not None:
            self._take_workspace(found)
        for name in self._written:
            self._check_written(found, name)
        for action in self._made:
            place = getattr(found, action.dest)
            if place is not None and action.metavar == "DIR" and Path(place).is_file():
                raise InputError(f"{_name_of(action)} {place} is a file: give the path of a folder")
            if place is not None and not Path(place).exists():
                _check_place(_name_of(action), Path(place))
        return found, rest

    def _refuse_empty(self, found: argparse.Namespace) -> None:
        """Empty arguments come from variables of a shell that are not set."""
        for action in self._actions:
            value = getattr(found, action.dest, None)
            if value != action.default and "" in (value if isinstance(value, list) else [value]):
                self.error(f"argument {_name_of(action)}: is empty")

    def _check_written(self, found: argparse.Namespace, name: str) -> None:
        """Refuses a file that cannot be written, that the command reads, or that is a part of a model or a knowledge base.

        This is checked before the command has worked for hours.
        """
        value, flag = getattr(found, name), f"--{name.replace('_', '-')}"
        if value is None or "://" in value:
            return
        path = Path(value)
        if path.is_dir() or value.endswith("/"):
            raise InputError(f"{flag} {path} is a folder: give the path of a file")
        if path.exists() and not path.is_file():  # it would be replaced, not written to
            raise InputError(f"{flag} {path} is a device or a pipe: give the path of a file")
        if path.exists() and (owner := _owner(Path(os.path.realpath(path)))):
            raise InputError(f"{flag} {path} is a part of {owner}: name another file")
        _check_place(flag, path)
        for action in self._actions:
            other = getattr(found, action.dest, None)
            if action.metavar != "FILE" or action.dest == name or not isinstance(other, str):
                continue
            if os.path.realpath(other) == os.path.realpath(path):
                raise InputError(f"{flag} {path} is also {_name_of(action)}: name another file")

    def _refuse_addresses(self, found: argparse.Namespace) -> None:
        ways = dict.fromkeys(
            ("workspace", *self._parts), "copy it to a folder with `realm pull ADDRESS FOLDER`"
        )
        if self._out_is_local:
            ways["out"] = "`realm push FOLDER ADDRESS` copies a folder there"
        for name, way in ways.items():
            value = getattr(found, name, None)
            if isinstance(value, str) and value.startswith(("s3://", "gs://")):
                flag = "--in" if name == "workspace" else f"--{name}"
                raise InputError(f"{flag} {value} must be on this machine: {way}")

    def _take_workspace(self, found: argparse.Namespace) -> None:
        given = [flag for flag in self._parts if getattr(found, flag) is not None]
        if found.workspace is None:
            if missing := [flag for flag in self._required if flag not in given]:
                self.error(f"the following arguments are required: {_flags(missing)}, or --in WORKSPACE")
            return
        if given:
            self.error(f"--in {found.workspace} replaces {_flags(self._parts)}: leave out {_flags(given)}")
        # Imported here because this file needs modules that Windows lacks.
        from realm.hub import workspace_folder, workspace_part

        workspace = workspace_folder(found.workspace)
        for flag, name in self._parts.items():
            setattr(found, flag, str(workspace_part(workspace, name)))

    def add_switch(self, flag: str, help: str) -> None:
        """Declares a flag without a value, which is False if the flag is not given."""
        self.add_argument(flag, action="store_true", help=help)

    def add_engine(self, what: str) -> None:
        """Adds --engine and --ray-address. `what` is the end of the help text, after the word "where"."""
        self.add_argument(
            "--engine",
            choices=("local", "ray"),
            help=f"where {what}: on this machine (local, the default), or on all machines of a Ray cluster (ray)",
        )
        self.add_argument(
            "--ray-address",
            metavar="HOST:PORT",
            help="address of the Ray cluster (default: the environment variable RAY_ADDRESS, else a running cluster on this "
            "machine, else a new cluster)",
        )

    def add_tagger(
        self,
        default: str = f"the setting `tagger`, which is {PassagesConfig.tagger}",
        on_engine: str = "sources are read and the tagger runs",
        parallel: bool = True,
    ) -> None:
        """Adds --tagger, the engine and, if `parallel` is true, --processes.

        `default` and `on_engine` are parts of the help texts.
        """
        self.add_argument(
            "--tagger",
            metavar="NAME",
            help="tagger of names and dates: realm, spacy:MODEL, hf:MODEL, or rules (dates only) "
            f"(default: {default})",
        )
        if parallel:
            self.add_argument(
                "--processes",
                metavar="N",
                type=positive,
                help="number of processes that tag documents, and that read PDF files, Word files, and parts of dumps and ZIM "
                "archives (default: one per core, at most 8)",
            )
        self.add_engine(on_engine)

    def add_kb(self, required: bool = True) -> None:
        """Adds --kb, the knowledge base that a command uses."""
        self.add_part("kb", "kb", required, "KB", "folder of the knowledge base")

    def add_model(self, required: bool = True) -> None:
        """Adds --model, the model that a command uses."""
        self.add_part("model", "model", required, "MODEL", "model: a folder, package:NAME or hf:OWNER/NAME")

    def add_reader(self, does: str) -> None:
        """Adds --reader, a span reader to use instead of that of the model. The flag sets the setting `reader`."""
        self.add_argument(
            "--reader",
            metavar="NAME",
            help=f"{does}: a model, or a checkpoint with BERT's question-answering head (folder or hub name)",
        )

    def add_init(self, required: bool, metavar: str, help: str) -> None:
        """Adds --init, the model or encoder that a stage starts from."""
        self.add_part("init", "model", required, metavar, help)

    def add_written(self, flag: str, help: str, required: bool = False, addresses: bool = False) -> None:
        """Declares the flag for a file that the command writes. `addresses`: whether it can be on object storage."""
        self._written.append(self.add_argument(flag, metavar="FILE", required=required, help=help).dest)
        self._out_is_local = self._out_is_local or (flag == "--out" and not addresses)

    def add_out(self, what: str) -> None:
        """Adds --out, the file or folder that a command writes; `what` is the help text."""
        self._out_is_local = True
        self.makes(self.add_argument("--out", metavar="OUT", required=True, help=what))

    def makes(self, argument: argparse.Action) -> None:
        """Declares that an argument is a folder which the command makes, or which an earlier command made."""
        self._made.append(argument)

    def add_sources(self, addresses: bool = True) -> None:
        """Adds SOURCE..., the documents that a command reads, and --strict. `addresses`: whether it reads remote files."""
        remote = "the address of a file or folder (https:// s3:// gs:// hf://), " if addresses else ""
        self.add_argument(
            "sources",
            metavar="SOURCE",
            nargs="+",
            help="file or folder (.jsonl .json .txt .text .log .md .markdown .mdx .html .htm .xhtml .csv .tsv .xml .warc, also "
            "compressed as .gz .bz2 .xz .zst; .rst .ipynb .parquet .arrow .lance .pdf .docx .odt .pptx .xlsx .xlsm .xls .ods "
            ".epub .eml .mbox .zim; wiki_00 of WikiExtractor), "
            f"{remote}or package:vital-articles or package:factbook",
        )
        self.add_switch(
            "--strict",
            "end with an error at the first file, line or row that cannot be read (default: files, lines and rows that cannot "
            "be read are left out, and listed with the reason)",
        )

    def add_train_and_dev(self) -> None:
        """Adds --train and --dev, question files for training, and --regex and --no-regex."""
        self.add_argument(
            "--train", metavar="FILE", required=True, help="file of training questions with answers"
        )
        self.add_argument(
            "--dev",
            metavar="FILE",
            required=True,
            help="file of questions with answers, by which the best weights are chosen",
        )
        self.add_regex()

    def add_where(self, what: str, of: str = " of documents") -> None:
        """Adds --where, a filter over the fields of documents; `what` and `of` are the beginning of the help text."""
        self.add_argument(
            "--where",
            metavar="FILTER",
            help=f"{what}{of} whose fields match this filter, such as \"year >= 2020 and source = 'handbook'\" "
            "(`realm kb info` lists the fields)",
        )

    def add_regex(self) -> None:
        """Adds --regex and --no-regex: whether the answers of a question file are regular expressions."""
        self.add_argument(
            "--regex",
            action=argparse.BooleanOptionalAction,
            help="treat all answers as regular expressions; --no-regex: only the answers that the file marks with "
            '"regex": true (default: the answers that the file marks, and all answers in CuratedTREC files of DrQA)',
        )

    def add_questions(self, required: bool = True) -> None:
        """Adds --questions, a file of questions."""
        self.add_argument(
            "--questions",
            metavar="FILE",
            required=required,
            help="question file (.jsonl, .json, .tsv, also compressed)",
        )

    def add_method(
        self, note: str = "", methods: Sequence[str] = ("dense", "bm25", "hybrid"), default: str | None = None
    ) -> None:
        """Adds --method, how passages are ranked. `note` is the end of the help text."""
        unnamed = default or "the method with which the model was calibrated, else dense"
        ways = (
            "vectors (dense), words (bm25) or both (hybrid)"
            if "hybrid" in methods
            else "vectors (dense) or words (bm25)"
        )
        self.add_argument(
            "--method",
            choices=methods,
            default=default,
            help=f"find passages by {ways} (default: {unnamed}){note}",
        )


def _check_place(name: str, path: Path) -> None:
    """Refuses the argument `name` if nothing can be made at its path, before the command has worked for hours."""
    folder = next(one for one in Path(os.path.realpath(path)).parents if one.exists())
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        refused = f"{name} {path} cannot be written: no file can be made in {folder}: {error.strerror}"
        raise InputError(refused + way_out(folder, error)) from error


def _owner(file: Path) -> str:
    """The model or the knowledge base that a file is a part of, with its kind; "" if the file is a part of none."""
    # Imported here because this file needs modules that Windows lacks.
    from realm.folders import what_it_is
    from realm.model.manifest import read_manifest

    for folder in file.parents:
        match what_it_is(folder):
            case "a knowledge base":
                return f"the knowledge base {folder}"
            case "a model":
                # The checksums are removed from the manifest of a model that was changed on purpose.
                own = read_manifest(folder).get("checksums")
                if own is None or file.relative_to(folder).as_posix() in own:
                    return f"the model {folder}"
    return ""


def _name_of(action: argparse.Action) -> str:
    return "/".join(action.option_strings) or str(action.metavar)


def given_flags(args: argparse.Namespace, *names: str) -> list[str]:
    """The flags among `names` that are given, in this order.

    >>> given_flags(argparse.Namespace(gold=True, model=None, save_run="run", set=[]), "gold", "model", "save_run", "set")
    ['--gold', '--save-run']
    """
    return [f"--{name.replace('_', '-')}" for name in names if getattr(args, name) not in (None, False, [])]


def _flags(names: Iterable[str]) -> str:
    return " and ".join(f"--{name}" for name in names)


def add_command(
    commands: "Commands[Parser]",
    run: Callable[[argparse.Namespace], None],
    does: str,
    example: str,
    *,
    section: str | None = None,
    reports: bool = False,
    continues: bool = False,
    shares: bool = False,
) -> Parser:
    """Declares the command with the name of the function `run`: `_compare_models` runs `realm compare-models`.

    `section` is the command's table in configuration files; `reports` adds the flag --json; `continues` says whether the same
    command continues an interrupted one; `shares`, whether processes that `torchrun` starts share the work.
    """
    parser = commands.add_parser(
        run.__name__.removeprefix("_").replace("_", "-"),
        help=does,
        # `RawDescriptionHelpFormatter`, which keeps the lines of the example, does not wrap the description.
        description=textwrap.fill(f"{does[0].upper()}{does[1:]}.", 78),
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if section is not None:
        parser.add_argument(
            "--config",
            metavar="FILE",
            help=f"read settings from the table [{section}] of this TOML file, or of the preset with this name",
        )
        parser.add_argument(
            "--set",
            metavar="NAME=VALUE",
            action="append",
            default=[],
            help="change one setting; overrides --config; can be given several times; an unknown NAME prints all names",
        )
    if reports:
        parser.add_switch("--json", "print the result as one JSON object")
    parser.set_defaults(
        run=run,
        section=section,
        called=parser.prog.removeprefix("realm "),
        continues=continues,
        shares=shares,
    )
    return parser


def engine_of(args: argparse.Namespace) -> EngineConfig:
    """The engine given by --engine and --ray-address."""
    try:
        return EngineConfig(args.engine or "local", args.ray_address or "")
    except ValueError as error:
        raise InputError(str(error)) from None


def need_model_but_for_words(args: argparse.Namespace) -> None:
    """Raises an InputError if the command has no --model, and its --method or --set needs one.

    --config is accepted, because a preset can also have settings that other commands use.
    """
    if args.model is not None:
        return
    if args.method != "bm25":
        method = args.method or "dense, the default,"
        raise InputError(f"--method {method} needs --model; without --model, use --method bm25")
    if args.set:
        raise InputError("--method bm25 without --model uses no settings: leave out --set, or give --model")


def settings(args: argparse.Namespace, cls: type[T], *flags: str) -> T:
    """Settings of the command: values from --config, replaced by those from --set, then by those from other flags.

    These other flags are --reader and `flags`; each has the name of a setting.
    """
    given = [(name, getattr(args, name, None)) for name in ("reader", *flags)]
    # TOML has no surrogates, by which JSON would escape an emoji.
    texts = {name: json.dumps(value, ensure_ascii=False) for name, value in given if isinstance(value, str)}
    last = [f"{name}={texts.get(name, value)}" for name, value in given if value is not None]
    return read_config(cls, args.config, args.section, [*args.set, *last])


def by_table(given: Sequence[str], tables: Iterable[str]) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """Table -> its settings among `given`, as NAME=VALUE instead of TABLE.NAME=VALUE; and the settings of no such table.

    >>> by_table(["kb.held_out=0.1", "seeds=[1]"], ["kb", "ict"])
    ({'kb': ('held_out=0.1',)}, ['seeds=[1]'])
    """
    found = {
        name: tuple(one.removeprefix(f"{name}.") for one in given if one.startswith(f"{name}."))
        for name in tables
    }
    others = [one for one in given if not one.startswith(tuple(f"{name}." for name in found))]
    return {name: settings for name, settings in found.items() if settings}, others


def positive(text: str) -> int:
    """Converts the text of a flag to a whole number of at least 1, which fits in 64 bits."""
    if not text.isdecimal() or len(text) > 18 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def report(args: argparse.Namespace, result: Mapping[str, Any], lines: Sequence[str] | None = None) -> None:
    """Prints the result of a command: with --json as one JSON object, else `lines`; if `lines` is None, one value per line."""
    if args.json:
        print(json.dumps(result, ensure_ascii=False))
        return
    width = max(map(len, result), default=0)
    shown = lines if lines is not None else [f"{k:<{width}}  {_plain(v)}" for k, v in result.items()]
    print(for_terminal("\n".join(shown)))


def for_terminal(text: str) -> str:
    """The text without control characters, which a document may contain and a terminal would obey; line breaks stay.

    >>> for_terminal("a\\x1b[2Jb\\n\\tc")
    'a[2Jb\\n\\tc'
    """
    return _CONTROLS.sub("", text)


def say_where(args: argparse.Namespace, what: str, place: str | Path) -> None:
    """Prints on standard error where the command has written its result. `what` is, for example, "the index is"."""
    sys.stdout.flush()  # so that the result is printed before this line
    print(f"{args.called}: {what} in {place}", file=sys.stderr)


def report_outcomes(
    args: argparse.Namespace,
    summary: Mapping[str, Any],
    outcomes: Sequence[Mapping[str, Any]],
    lines: Sequence[str] | None = None,
) -> None:
    """Prints the result of a command as `report` does; with --out, also writes the result and the `outcomes` as JSON."""
    if args.out:
        Path(args.out).parent.mkdir(parents=True, exist_ok=True)
        write_json(args.out, {**summary, "outcomes": outcomes})
    report(args, summary, lines)
    if args.out:
        say_where(args, "the report is", args.out)


def _plain(value: Any) -> str:
    match value:
        case bool() | str() | None:
            return str(value)
        case int():
            return f"{value:,}"
        case float():
            return f"{value:.4g}"
        case dict():
            return ", ".join(f"{name} {_plain(one)}" for name, one in value.items()) or "none"
        case _:
            return "; ".join(map(_plain, value)) or "none"
