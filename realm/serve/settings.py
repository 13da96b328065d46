"""Settings of `realm serve`."""

from dataclasses import dataclass
from typing import NamedTuple

from realm.errors import at_least
from realm.qa.pipeline import AnswerConfig

MOST_READ = 20
"""Largest number of passages per question that are searched for answers."""
MOST_RETRIEVED = 100
"""Largest number of passages that a request may retrieve."""
MOST_QUESTIONS = 256
"""Largest number of questions in a request."""
MOST_DOCUMENTS = 1000
"""Largest number of documents that a request may add."""
MOST_FIELDS = 100
"""Largest number of fields of a document that a request adds."""
LONGEST_IN_ADDRESS = 1000
"""Largest length in characters of a prefix and of a filter in the address of a request, whose head has a limit too."""
MOST_CHANGES = 16
"""Largest number of changes of the knowledge base that wait; the server refuses further changes with 429."""
WRITE_SECONDS = 600.0
"""Largest time in seconds to add or delete documents."""
POLL_SECONDS = 1.0
"""Seconds between two checks for a new version on disk."""
BODY_BYTES = 8_388_608
"""Largest size of a request body in bytes."""
CONNECTIONS = 1024
"""Largest number of open connections; it is never more than half of the number of files that the process may open. If a further
connection is opened, the server closes the connection that has waited longest for its client."""
HEAD_SECONDS = 10.0
"""Largest time in seconds until the head of a request has arrived, and largest time that a connection may be idle."""


class Tokens(NamedTuple):
    """Tokens that clients must send."""

    write: str | None = None
    """Token for changes of the knowledge base, which also allows all other requests. None: nobody may change it."""
    read: str | None = None
    """Token for all other requests. None: everybody may send them."""


@dataclass(frozen=True)
class ServeConfig(AnswerConfig):
    """Settings of answers, as for `realm answer`, and limits of the server."""

    batch: int = 16
    """Largest number of questions in a batch, which can contain questions of all clients."""
    queue: int = 1024
    """Largest number of questions that wait; the server refuses further questions with 429."""
    seconds: float = 30.0
    """Time limit in seconds of each of three steps: receiving a body, computing a response, and sending the response."""
    name: str = ""
    """Name of the corpus on the web page. If empty, the name of the folder of the knowledge base, or, if this folder is called
    `kb`, the name of the folder that contains it."""
    feedback: str = ""
    """File to which a writable server adds the feedback on answers. If empty, `KB.feedback.jsonl` beside the knowledge
    base `KB`."""
    hosts: tuple[str, ...] = ()
    """Accepted host names in addition to those of the server. If `hosts` is empty, and the address of the server is not a
    loopback address, all host names are accepted."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, batch=1, queue=1)
        if self.seconds <= 0:
            raise ValueError(f"seconds is {self.seconds}: it must be above 0")
        if self.read > MOST_READ:
            raise ValueError(f"read is {self.read}: it must be at most {MOST_READ}")

    @property
    def questions(self) -> int:
        """Largest number of questions in a request, which is not larger than `queue`."""
        return min(MOST_QUESTIONS, self.queue)
