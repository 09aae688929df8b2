"""The scripts that docs/protocol.md shows, taken out of it and run as they stand there."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import hr_repo
import pytest

#: How long a script may take.
WAIT_S = 30


def script(name: str, folder: Path) -> Path:
    """Write the fenced block marked with ``<!-- run: name -->`` to a file."""
    text = (hr_repo.ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
    path = folder / name
    found = re.search(rf"<!-- run: {re.escape(name)} -->\n```\w+\n(.*?)```", text, flags=re.DOTALL)
    assert found, name
    path.write_text(found[1], encoding="utf-8")
    return path


@contextlib.contextmanager
def running(*command: object) -> Iterator[subprocess.Popen[str]]:
    """Run a command; it is killed at the latest when the block is left."""
    process = subprocess.Popen(
        [str(item) for item in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=WAIT_S)


def finished(process: subprocess.Popen[str]) -> str:
    """Wait for a script's success and return what it printed."""
    output, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, errors
    return output


def node() -> str:
    """Return the path of node, or skip the test where it or one of its two packages is missing.

    ``npm install zeromq @msgpack/msgpack`` in any folder, and NODE_PATH naming its node_modules, is all.
    """
    path = shutil.which("node")
    probe = [path or "", "-e", "require('zeromq'); require('@msgpack/msgpack')"]
    if path is None or subprocess.run(probe, capture_output=True, timeout=WAIT_S, env=os.environ).returncode:
        pytest.skip("needs node with zeromq and @msgpack/msgpack (NODE_PATH names their folder)")
    return path
