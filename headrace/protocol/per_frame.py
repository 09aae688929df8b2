"""Dataclasses of which there is at least one per frame: frozen for the type checker, plain at run time.

A frozen dataclass is made with ``object.__setattr__`` for each field, which is three times slower than an
assignment; making messages took a sixth of the broker's time of a small frame (ADR 0011). Nothing else
changes: mypy refuses every assignment to a field, equality and hash are those of the frozen class.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataclasses import dataclass as per_frame
else:
    from dataclasses import dataclass

    def per_frame(*, frozen: bool, slots: bool, order: bool = False):
        """Return the decorator ``dataclass``, without the check of assignments at run time."""
        return dataclass(slots=slots, unsafe_hash=frozen, order=order)


__all__ = ["per_frame"]
