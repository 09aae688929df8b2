"""docs/protocol.md says what the code does: codes, limits, and the bytes of every message."""

from __future__ import annotations

import dataclasses
import re

import hr_repo
import hr_wire
import pytest

from headrace.errors import Code
from headrace.protocol import codec
from headrace.protocol.messages import Frame, Limits, Outcome
from headrace.protocol.tensors import ITEM_BYTES

TEXT = (hr_repo.ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    """The text under one heading, up to the next heading of the same level."""
    return re.split(r"^## ", TEXT.split(f"\n## {title}\n")[1], maxsplit=1, flags=re.MULTILINE)[0]


def first_cells(text: str) -> list[str]:
    """Code spans in the first column of a section's tables."""
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])]


def test_the_code_table_is_the_code():
    """Every code has its row with cause and remedy, in the order of errors.Code, and there are no others."""
    rows = [line for line in section("Codes").splitlines() if line.startswith("| `")]

    assert first_cells(section("Codes")) == [code.value for code in Code]
    assert all(len(cell.strip()) >= 2 for row in rows for cell in row.strip("|").split("|"))


def test_the_limits_table_is_the_limits():
    """Every limit stands there with its default."""
    documented = dict(re.findall(r"^\| `(\w+)` \| ([\d,]+) \|", section("Limits"), flags=re.MULTILINE))

    numbers = {name: int(value.replace(",", "")) for name, value in documented.items()}
    assert numbers == dataclasses.asdict(Limits())


def test_the_field_tables_name_every_field():
    """What a frame and an outcome can carry is in their tables."""
    frame_fields = {field.name for field in dataclasses.fields(Frame)} - {"payload"}
    outcome_fields = {field.name for field in dataclasses.fields(Outcome)} - {"payloads"}

    assert frame_fields <= set(first_cells(section("Frames")))
    assert outcome_fields <= set(first_cells(section("Outcomes")))


def test_all_dtypes_are_named():
    """The list of dtypes is the codec's."""
    (row,) = [line for line in section("Frames").splitlines() if line.startswith("| `dtype`")]

    assert set(ITEM_BYTES) <= set(re.findall(r"\w+", row))


def test_every_message_type_is_described():
    """No message exists that the tables do not name."""
    described = set(first_cells(section("All messages"))) | {"outcomes"}

    assert set(codec.TYPE_NAMES.values()) <= described


def test_every_code_of_the_bad_input_table_exists():
    """The table of bad input speaks of codes that there are."""
    named = re.findall(r"`(\w+)`, (?:rejected|refused|error)", section("Bad input"))

    assert len(named) > 20
    assert set(named) <= {code.value for code in Code}


@pytest.mark.parametrize("name", re.findall(r"<!-- bytes: (.+) -->", TEXT))
def test_the_bytes_shown_are_the_bytes_sent(name):
    """Each sample in the document is what encode makes of it."""
    block = TEXT.split(f"<!-- bytes: {name} -->\n```text\n")[1].split("\n```")[0]
    hex_lines = block.split("\n\n")[1].splitlines()
    parts: list[str] = []
    for line in hex_lines:
        kind, text = line[:8].strip(), line[8:]
        if kind:
            parts.append("")
        parts[-1] += "" if text == "(0 bytes)" else text

    assert parts == [bytes(part).hex() for part in codec.encode(hr_wire.SAMPLES[name])]


def test_every_message_type_shows_its_bytes():
    """There is a byte sample of each type."""
    shown = {
        codec.TYPE_NAMES[type(hr_wire.SAMPLES[name])] for name in re.findall(r"<!-- bytes: (.+) -->", TEXT)
    }

    assert shown == set(codec.TYPE_NAMES.values())
