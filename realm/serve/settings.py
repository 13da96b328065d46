"""Settings of `realm serve`."""

from dataclasses import dataclass

from realm.errors import at_least
from realm.qa.pipeline import AnswerConfig

MOST_READ = 20
"""Largest number of passages to read for a question."""
MOST_RETRIEVED = 100
"""Largest number of passages that a request may retrieve."""
MOST_QUESTIONS = 256
"""Largest number of questions in a request."""
MOST_DOCUMENTS = 1000
"""Largest number of documents that a request may add."""
MOST_CHANGES = 16
"""Largest number of changes of the knowledge base that wait; the server refuses more with 429."""
WRITE_SECONDS = 600.0
"""Largest time in seconds to add or delete documents."""
POLL_SECONDS = 1.0
"""Seconds between two checks for a new version on disk."""


@dataclass(frozen=True)
class ServeConfig(AnswerConfig):
    """Settings of answers, as for `realm answer`, and limits of the server."""

    batch: int = 16
    """Largest number of questions, of all clients together, in one batch."""
    queue: int = 1024
    """Largest number of questions that wait; the server refuses more with 429."""
    body_bytes: int = 8_388_608
    """Largest size of a request body in bytes."""
    connections: int = 1024
    """Largest number of open connections, and at most half of the files that the process may open. Beyond it, the connection
    that has waited longest for its client is closed."""
    head_seconds: float = 10.0
    """Largest time in seconds for the head of a request to arrive, and for a connection to be idle."""
    seconds: float = 30.0
    """Largest time in seconds for each of: receiving a body, making an answer, the client's reading of the answer."""
    hosts: tuple[str, ...] = ()
    """Accepted host names in addition to the server's own; if empty and the server is not on loopback, all are accepted."""

    def __post_init__(self) -> None:
        at_least(self, read=1, answers=1, batch=1, queue=1, body_bytes=1, connections=1)
        for name in ("head_seconds", "seconds"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be above 0")
        if self.read > MOST_READ:
            raise ValueError(f"read is {self.read}: it must be at most {MOST_READ}")

    @property
    def questions(self) -> int:
        """Largest number of questions in a request, which never exceeds the number that may wait."""
        return min(MOST_QUESTIONS, self.queue)
