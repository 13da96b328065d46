from collections.abc import Iterator

import pytest

from tests.documents.shared_child import shared_child


@pytest.fixture(scope="module")
def one_child() -> Iterator[None]:
    """The tests of a file read their files in one process."""
    with shared_child():
        yield
