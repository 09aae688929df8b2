"""The configuration's document and presets are true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hr_repo import ROOT

from headrace import config_docs


def test_the_document_is_current() -> None:
    """docs/configuration.md is what `make docs` prints: every key is documented."""
    written = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")

    assert written == config_docs.render(), "run make docs"
    for key in config_docs.every_key():
        assert f"| `{key.rsplit('.', 1)[-1]}` |" in written


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.name)
def test_every_key_of_a_preset_has_unit_and_reason(path: Path) -> None:
    """`key = value # unit. Reason`: who copies a preset knows what each line is for."""
    keys = [line for line in path.read_text(encoding="utf-8").splitlines() if re.match(r"\w+ *=", line)]

    assert keys
    bare = [line for line in keys if not re.search(r" # \S.{12,}", line)]
    assert bare == []
