"""What holds for all tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import structlog

# A shell without job control starts background jobs with SIGINT ignored, and children inherit that: a run of
# the tests in the background would see no process react to Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """A command that is called in this process sets the logs up, for all tests that follow."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)
