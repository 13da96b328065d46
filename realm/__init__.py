"""REALM: a retriever and a reader that are trained on unlabelled text and answer questions with evidence.

    import realm

    manual = realm.fit(["docs/"], "manual")  # and later: realm.load("manual")
    answer = manual.answer("when does the warranty end?")
    print(answer.text, answer.probability, answer.passage.title)

The import of this package is fast, because the modules of the names in `__all__` are imported when a name is first used.
"""

# Type checkers assume True. An import from `typing` would take longer than the rest of this file.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from realm.errors import RealmError
    from realm.workspace.fit import fit
    from realm.workspace.folder import Workspace, load

__version__ = "0.1.0"
__all__ = ["RealmError", "Workspace", "__version__", "fit", "load"]

_HOMES = {
    "RealmError": "realm.errors",
    "Workspace": "realm.workspace.folder",
    "fit": "realm.workspace.fit",
    "load": "realm.workspace.folder",
}

if not TYPE_CHECKING:  # otherwise type checkers would accept every name

    def __getattr__(name):
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        import_module("realm.environment").set_torch_environment()
        return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
