"""A stand-in for an object of a compiled class, whose methods can't be replaced one by one."""

from __future__ import annotations

from typing import Any


class StandIn:
    """Everything of ``inner`` but the methods that are named."""

    def __init__(self, inner: object, **methods: object) -> None:
        self._inner = inner
        self.__dict__.update(methods)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
