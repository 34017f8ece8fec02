from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from infinity.io import Queue
from tests.support.files import PLACES, directory_on
from tests.support.queues import WORKING_BACKENDS


@pytest.fixture(params=PLACES)
def directory(request: pytest.FixtureRequest) -> Iterator[Path]:
    with directory_on(request.param) as path:
        yield path


@pytest.fixture(params=WORKING_BACKENDS)
def queue(request: pytest.FixtureRequest) -> Iterator[Queue]:
    with Queue(backend=request.param) as opened:
        yield opened


@pytest.fixture
def one_queue() -> Iterator[Queue]:
    """For what does not depend on the backend."""
    with Queue(backend="threads") as opened:
        yield opened
