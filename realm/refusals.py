"""Work that worker processes refuse or are not asked for, and that the process of the command does itself.

`realm.local_processes` and `realm.ray_actors` apply a function to items in worker processes.
"""

from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class Refused(Exception):
    """A worker cannot do an item, for example because its machine lacks a file, a library or a key; another process may."""


class OwnWork(NamedTuple, Generic[Item, Result]):
    """The part of the work that the process of the command does itself."""

    function: Callable[[Item], Iterable[Result]]
    """Gives the same results for an item as the function of the workers."""
    only: Callable[[Item], bool]
    """Whether only this process does an item."""
