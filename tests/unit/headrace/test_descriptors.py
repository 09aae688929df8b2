"""The limit on open files: raised where that is allowed, and counted against."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest

from headrace import descriptors
from headrace.descriptors import Descriptors, count_open, limits, raise_limit

SCRIPT = """
import resource
from headrace.descriptors import raise_limit
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
print(raise_limit({wanted}), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "found"),
    [(60, 80, 100, 80), (60, 80, 70, 70), (80, 80, 100, 80), (80, 90, 70, 80)],
)
def test_the_soft_limit_is_raised_to_the_hard_one_at_most(
    soft: int, hard: int, wanted: int, found: int
) -> None:
    """And never lowered."""
    script = SCRIPT.format(soft=soft, hard=hard, wanted=wanted)

    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True)

    assert done.stdout.split() == [str(found), str(found)]


def test_a_sandbox_that_forbids_it_leaves_the_limit_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever starts goes on with what there is."""

    def refuse(*_arguments: object) -> None:
        raise PermissionError

    monkeypatch.setattr(descriptors, "limits", lambda: (60, 80))
    monkeypatch.setattr(resource, "setrlimit", refuse)

    assert raise_limit() == 60


def test_no_limit_is_a_large_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's word for it is -1, which is below everything."""
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (60, resource.RLIM_INFINITY))

    assert limits() == (60, descriptors.UNLIMITED)


def test_what_is_open_is_counted() -> None:
    """The listing that counts does not count itself."""
    before = count_open()
    reader, writer = os.pipe()

    assert count_open() == before + 2
    os.close(reader)
    os.close(writer)


def test_a_crowd_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is opened after the count is added to it, until the next one."""
    now_s = [0.0]
    monkeypatch.setattr(descriptors.time, "monotonic", lambda: now_s[0])
    counts = [10, 30]
    found = Descriptors(100, lambda: counts.pop(0))

    assert found.open_count() == 10
    found.note_opened()
    assert found.open_count() == 11
    now_s[0] = descriptors.COUNT_AGE_S
    assert found.open_count() == 30
