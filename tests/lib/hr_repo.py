"""Where the repository is, and what lies in it: for tests of the repository's own rules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

#: Folder at the top of the repository -> the package it is imported as.
PACKAGE_FOLDERS = {
    "headrace": "headrace",
    "broker": "headrace.broker",
    "workers": "headrace.workers",
    "clients": "headrace.clients",
    "configs": "headrace.configs",
}


def source_files(folder: str) -> list[Path]:
    """Return the Python files of one folder, sorted."""
    return sorted(p for p in (ROOT / folder).rglob("*.py") if "__pycache__" not in p.parts)


def product_files() -> list[Path]:
    """Return every Python file that is shipped."""
    return [path for folder in PACKAGE_FOLDERS for path in source_files(folder)]


def imported_modules(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of every import in a file, also those inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.lineno, node.module
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"
