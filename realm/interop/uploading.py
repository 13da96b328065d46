"""Uploads a model, or a workspace with its documents, to the Hugging Face hub.

A repository with a model has the files of `realm.interop.sharing.write_hub`. A repository with a workspace has the model in
`model/`, the knowledge base in `kb/`, and the model card. Files that commands make again from the rest of the knowledge base
are not uploaded.
"""

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypedDict, cast

from realm.errors import InputError, first_line, writing
from realm.folders import LOCK
from realm.interop.object_storage.folder import local_files, one_version
from realm.interop.object_storage.listing import KB_KIND
from realm.interop.sharing import CARD, card, write_hub
from realm.model.manifest import MANIFEST, checked_manifest, model_path
from realm.store.knowledge_base import KnowledgeBase

KEPT = {".gitattributes", ".gitignore"}
"""Files of a repository that an upload does not delete."""
MANIFESTS = {MANIFEST, f"model/{MANIFEST}"}
"""A repository that `realm share` made has one of these files."""


class SharedJson(TypedDict):
    """Report of `realm share`."""

    url: str
    commit: str
    files: int
    bytes: int
    public: bool


def share(
    model: str, kb: str | None, name: str, licence: str, data: str, numbers: Mapping[str, Any], public: bool
) -> SharedJson:
    """Uploads a model to the repository `name` of the hub, which is created if it does not exist, in one commit.

    Args:
        model: the model.
        kb: folder of the knowledge base to upload with the model, or None.
        name: OWNER/NAME.
        licence: licence of the weights, for the card.
        data: description of the training text, for the card.
        numbers: reports of `realm evaluate` or `realm probe`, for the card.
        public: whether everybody may read the repository. A repository that exists keeps its visibility.

    Raises:
        WriteFailed: the copy of the model for the upload cannot be written.
        DamagedError: a file of the model differs from its checksum.
        InputError: the model cannot be read, or the hub refuses the upload; or the repository exists, and everybody can read it
            although `public` is False, or it has files that `realm share` did not make; or files of the knowledge base still
            have texts that were deleted.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    # The base classes: errors of the network, whose class depends on the version of huggingface_hub, and of the system.
    bases = cast(tuple[type[Exception], ...], HfHubHTTPError.__bases__)
    failures: tuple[type[Exception], ...] = (HFValidationError, *bases)
    with ExitStack() as stack:
        aside = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="realm-share-")))
        if kb is None:
            with writing(aside):
                write_hub(model_path(model), aside, name, licence, data, numbers)
            files = _files_in(aside)
        else:
            stack.enter_context(one_version(Path(kb), KB_KIND))
            if KnowledgeBase.open(kb).keeps_removed_texts():
                raise InputError(
                    f"files of {kb} can still have the texts of passages that were deleted or replaced: remove them with "
                    f"`realm kb compact --kb {kb}`, then repeat the command"
                )
            manifest = checked_manifest(model)
            (aside / CARD).write_text(card(manifest, name, licence, data, numbers, True), encoding="utf-8")
            files = _files_in(aside) | _files_in(model_path(model), "model/")
            files |= {f"kb/{path}": file for path, file in local_files(Path(kb), KB_KIND).items()}
        try:
            api = HfApi()
            try:
                _check_existing(name, bool(api.model_info(name).private), api.list_repo_files(name), public)
            except RepositoryNotFoundError:
                api.create_repo(name, private=not public)
            gone = sorted(set(api.list_repo_files(name)) - files.keys() - KEPT)
            commit = api.create_commit(
                name,
                [
                    *(CommitOperationAdd(place, str(file)) for place, file in files.items()),
                    *(CommitOperationDelete(place) for place in gone),
                ],
                commit_message="Upload by `realm share`",
            )
            found = api.model_info(name)
        except failures as error:
            status = getattr(getattr(error, "response", None), "status_code", None)
            hint = (
                ": log in with `hf auth login`, or set HF_TOKEN to a token that may write"
                if status in (401, 403)
                else ""
            )
            raise InputError(f"{name} cannot be uploaded to the hub ({first_line(error)}){hint}") from error
        size = sum(file.stat().st_size for file in files.values())
    return {
        "url": f"{api.endpoint}/{name}",
        "commit": commit.oid,
        "files": len(files),
        "bytes": size,
        "public": not found.private,
    }


def _check_existing(name: str, private: bool, files: Sequence[str], public: bool) -> None:
    """Refuses to publish without `public`, and to replace files that `realm share` did not make."""
    if not private and not public:
        raise InputError(f"{name} exists, and everybody can read it: give --public too, or another name")
    others = set(files) - KEPT - {CARD}
    if others and not MANIFESTS & others:
        raise InputError(
            f"{name} exists, and has files that `realm share` did not make, such as {min(others)}, which an upload would "
            "delete: give another name"
        )


def _files_in(folder: Path, prefix: str = "") -> dict[str, Path]:
    """The files of a folder: path in the repository -> file."""
    return {
        f"{prefix}{file.relative_to(folder).as_posix()}": file
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.name != LOCK
    }
