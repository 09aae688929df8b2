"""Measurements that docs/performance.md quotes: one command each, `python -m benchmarks NAME`.

Run from a checkout, with headrace installed in the environment. The checkout's own ``headrace/`` folder must
not hide the installed package, so it leaves the import path before anything is imported.
"""

from __future__ import annotations

import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]

sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != _ROOT]
