"""What the compiler is given says the same as our sources, on the same lines."""

from __future__ import annotations

import ast
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hr_repo import ROOT, source_files

from headrace.protocol.messages import Frame


@pytest.fixture(scope="module")
def native() -> Iterator[ModuleType]:
    """The build's own package, which is not installed."""
    sys.path.insert(0, str(ROOT))
    import native.modules
    import native.sources

    yield native
    sys.path.remove(str(ROOT))


def run(text: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": __name__}
    exec(compile(text, "given.py", "exec"), names)
    return names


SOURCE = '''"""Two classes."""
from __future__ import annotations
from dataclasses import dataclass
from headrace.protocol.per_frame import per_frame

@per_frame(frozen=True, slots=True)
class Seen:
    name: str
    size: int = 3  # of a thing

    def larger(self) -> int:
        return self.size + 1

@dataclass(slots=True, eq=False)
class Own:
    count: int = 0
'''


def test_the_written_init_takes_what_the_made_one_takes(native: ModuleType) -> None:
    """By position, by keyword, with defaults; equality, hash, fields and replace() stay."""
    seen = run(native.sources.write_out_inits(SOURCE))["Seen"]

    assert (seen("a").name, seen("a").size, seen("a", 5).larger()) == ("a", 3, 6)
    assert seen("a") == seen(name="a", size=3)
    assert hash(seen("a")) == hash(seen("a"))
    assert [field.name for field in dataclasses.fields(seen)] == ["name", "size"]
    assert dataclasses.replace(seen("a"), size=7).size == 7


def test_what_is_compared_by_identity_is_no_dataclass(native: ModuleType) -> None:
    """It needs neither equality nor hash, and its annotations may name what is imported for types only."""
    own = run(native.sources.write_out_inits(SOURCE))["Own"]

    assert own().count == 0
    assert not dataclasses.is_dataclass(own)


def test_frozen_classes_and_those_with_factories_are_left_alone(native: ModuleType) -> None:
    """An assignment to a frozen one must raise."""
    text = SOURCE.replace("@per_frame", "@dataclass").replace("= 0", "= field(default_factory=int)")

    assert native.sources.write_out_inits(text) == text


def test_a_field_of_two_lines_is_refused(native: ModuleType) -> None:
    """Its second line would be left behind."""
    with pytest.raises(ValueError, match="more than one line"):
        native.sources.write_out_inits(SOURCE.replace("size: int = 3", "size: int = (\n        3)"))


def test_every_statement_stays_on_its_line(native: ModuleType) -> None:
    """A traceback of compiled code names lines of the file in the repository."""
    for source in native.modules.compiled_sources():
        text = (ROOT / source).read_text(encoding="utf-8")
        given = native.sources.write_out_inits(text)

        assert _functions(text) == _functions(given), source


def _functions(text: str) -> list[tuple[str, int, int | None]]:
    return [
        (node.name, node.lineno, node.end_lineno)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef) and node.name != "__init__"
    ]


def test_the_protocol_and_the_core_are_compiled(native: ModuleType) -> None:
    """The list names what exists; of the protocol only the decorator is left out."""
    compiled = set(native.modules.compiled_sources())
    protocol = {path.relative_to(ROOT) for path in source_files("headrace/protocol")}

    assert {path.stem for path in protocol - compiled} == {"__init__", "per_frame"}
    assert Path("broker/core.py") in compiled
    assert all((ROOT / path).is_file() for path in compiled)


def test_a_frame_is_made_by_position() -> None:
    """The order of a class's fields is that of its arguments, compiled or not."""
    frame = Frame("s", b"x", 1, (1, 1, 1))

    assert [field.name for field in dataclasses.fields(frame)][:4] == ["stream", "payload", "nbytes", "shape"]
