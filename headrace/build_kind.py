"""Whether this headrace is the compiled one (docs/adr/0015-compiled.md): shown to people, no more."""

from __future__ import annotations

from importlib.util import find_spec


def is_compiled() -> bool:
    """Return whether the hot modules were compiled when this headrace was built: all of them, or none."""
    spec = find_spec("headrace.protocol.codec")
    return spec is not None and spec.origin is not None and not spec.origin.endswith(".py")


def build_kind() -> str:
    """Return ``compiled`` or ``pure Python``."""
    return "compiled" if is_compiled() else "pure Python"
