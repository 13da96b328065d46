"""Settings of `realm serve`."""

from dataclasses import dataclass

from realm.qa.pipeline import AnswerConfig


@dataclass(frozen=True)
class ServeConfig(AnswerConfig):
    """How answers are made, as `realm answer` makes them; and what is refused. `read` counts where a request says nothing."""

    most_read: int = 20
    """Most passages that a request may have read."""
    most_retrieved: int = 100
    """Most passages that a request may have retrieved."""
    questions: int = 256
    """Most questions of a request."""
    batch: int = 16
    """Most questions that are answered at once, whoever asked them."""
    queue: int = 1024
    """Most questions that wait; beyond, a request is refused with 429."""
    body_bytes: int = 8_388_608
    """Longest request body."""
    documents: int = 1000
    """Most documents that a request may add."""
    connections: int = 1024
    """Most open connections, and never more than half of the files that the process may open. Beyond, the client that has
    kept the server waiting for longest is left."""
    head_seconds: float = 10.0
    """How long the head of a request may take to arrive, and a connection may be idle."""
    seconds: float = 30.0
    """How long the body of a request may take to arrive, its answer to be made, and again to be read."""
    changes: int = 16
    """Most changes of the knowledge that wait; beyond, a request is refused with 429."""
    write_seconds: float = 600.0
    """How long adding or deleting documents may take."""
    poll_seconds: float = 1.0
    """Between looks for a new version on disk."""
    hosts: tuple[str, ...] = ()
    """Names besides this machine's own by which the server may be called; none, and not on loopback: any."""

    def __post_init__(self) -> None:
        counts = (
            "read",
            "answers",
            "most_read",
            "most_retrieved",
            "questions",
            "batch",
            "queue",
            "changes",
            "body_bytes",
            "documents",
            "connections",
        )
        for name in counts:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be 1 or more")
        for name in ("head_seconds", "seconds", "write_seconds", "poll_seconds"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be above 0")
        for part, whole in (("read", "most_read"), ("questions", "queue")):
            if getattr(self, part) > getattr(self, whole):
                raise ValueError(
                    f"{part} is {getattr(self, part)}, more than {whole}, {getattr(self, whole)}"
                )
