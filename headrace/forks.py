"""Tells whether this process is a fork of the one that made an object.

Asking for the process id is a system call, and the clients ask before each frame: a counter that a fork
raises in the child costs nothing.
"""

from __future__ import annotations

import os


class ForkCount:
    """``value`` is how often this process was forked from its first ancestor that imported this."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0

    def raise_in_child(self) -> None:
        self.value += 1


forks = ForkCount()

if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=forks.raise_in_child)
