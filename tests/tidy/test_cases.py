"""Each field case that the product must survive has a test that names it."""

from __future__ import annotations

import ast
import re

import pytest
from hr_repo import source_files


def ids(area: str, *numbers: int) -> list[str]:
    return [f"{area}-{number:02}" for number in numbers]


#: The cases whose behaviour is promised; those of later releases join when they are.
REQUIRED = [
    *ids("ZMQ", *range(1, 14), 15, *range(17, 22)),
    *ids("PAY", *range(1, 13)),
    *ids("IMG", *range(1, 9)),
    *ids("VID", 2, 3, 5, 7),
    *ids("BAT", 1, 2, 3, 4, 7, 9, 10, 11, 12, 14, 15),
    *ids("ORT", *range(1, 13)),
    *ids("PRC", *range(1, 12)),
    *ids("SCL", *range(1, 8)),
]

#: Folders whose tests run the product itself: sockets, workers, processes.
END_TO_END = ("tests/integration", "tests/e2e")


def cases_of(folder: str) -> set[str]:
    """Return the ids that stand in the docstrings of a folder's test functions."""
    found: set[str] = set()
    for path in source_files(folder):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                found.update(re.findall(r"\b[A-Z]{3}-\d{2}\b", ast.get_docstring(node) or ""))
    return found


EVERYWHERE = frozenset().union(*(cases_of(folder) for folder in END_TO_END))


@pytest.mark.parametrize("case", REQUIRED)
def test_every_required_case_is_tested_end_to_end(case: str) -> None:
    """In the docstring of a test that runs broker, worker or client over real sockets."""
    assert case in EVERYWHERE


def test_a_case_that_nobody_tests_is_seen() -> None:
    """The search finds docstrings of tests, not every mention: this file's own list counts for nothing."""
    assert cases_of("tests/tidy") == set()
    assert "ZMQ-01" in EVERYWHERE
