"""Where components find passages: a workspace, or a server of `realm serve`.

With a server, the process of the component needs no torch.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import realm
from realm.qa.answers import Hit
from realm.serve.client import Client

if TYPE_CHECKING:
    from realm.workspace.folder import Workspace

Source: TypeAlias = "str | os.PathLike[str] | Workspace | Client"
"""The folder of a workspace, the address of a server (http or https), or an open workspace or client."""


def opened(source: Source) -> "Workspace | Client":
    """The open workspace, or the client of the server. The client sends the token in REALM_READ_TOKEN, if there is one.

    Raises:
        InputError: the folder is not a workspace.
    """
    if isinstance(source, str) and source.startswith(("http://", "https://")):
        return Client(source, os.environ.get("REALM_READ_TOKEN"))
    return realm.load(source) if isinstance(source, str | os.PathLike) else source


def name_of(source: "Workspace | Client") -> str:
    """The folder of the workspace, or the address of the server, from which `opened` makes the source again."""
    return source.url if isinstance(source, Client) else str(Path(source.folder))


def metadata(hit: Hit) -> dict[str, Any]:
    """The fields, the title and the id of the document of a passage. `title` and `document` replace fields with these names."""
    return {**hit.fields, "title": hit.title, "document": hit.document}
