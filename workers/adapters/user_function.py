"""Adapters written by users: ``package.module:function``.

A function takes the whole batch and returns a list with one result per frame::

    def function(outputs: dict[str, numpy array [count, ...]], placements: list[Placement | None], **options)

or, with the option ``per_frame = true``, one frame at a time::

    def function(outputs: dict[str, numpy array], placement: Placement | None, **options)

A result is anything made of None, bool, numbers, text, bytes, lists and dicts (numpy scalars and arrays are
converted), or a pair of that and a dict of arrays, which are sent as tensors. Every other adapter option is
passed on as a keyword. The arrays are copies: writing into them changes nothing else.

Rules: a list of another length fails the whole batch with ``result_count``, because nothing tells which
result belongs to which frame. When the function raises for a batch, it is called again for each frame alone,
so that only the guilty one fails.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from headrace.errors import Code, ConfigError
from headrace.protocol.messages import FrameResult, Status, Value
from headrace.workers.adapters.base import (
    Adapter,
    AdapterError,
    Outputs,
    RowResult,
    non_finite_output,
    non_finite_result,
    to_frame_result,
)
from headrace.workers.adapters.options import Options
from headrace.workers.geometry import Placement

UserFunction = Callable[..., Any]


class PerFrameFunction(Adapter):
    """A user function that is called for each frame alone."""

    def __init__(self, name: str, function: UserFunction, options: dict[str, Value]) -> None:
        self.name = name
        self._function = function
        self._options = options

    def process_row(self, row: Outputs, placement: Placement | None) -> RowResult:
        """Call the function for one frame."""
        copies = {name: np.array(array) for name, array in row.items()}
        return _to_row_result(self._function(copies, placement, **self._options))


class BatchFunction(Adapter):
    """A user function that is called for all frames of a batch at once; see the module for the rules."""

    def __init__(self, name: str, function: UserFunction, options: dict[str, Value]) -> None:
        self.name = name
        self._function = function
        self._options = options

    def process(self, outputs: Outputs, placements: Sequence[Placement | None]) -> list[FrameResult]:
        """Return one result per frame. Frames whose outputs are not finite never reach the function."""
        results: dict[int, FrameResult] = {}
        for i in range(len(placements)) if non_finite_output(outputs) is not None else ():
            bad_name = non_finite_output({name: array[i, ...] for name, array in outputs.items()})
            if bad_name is not None:
                results[i] = non_finite_result(bad_name)
        good = [i for i in range(len(placements)) if i not in results]
        if good:
            selected = {name: array[good] for name, array in outputs.items()}
            answers = self._call(selected, [placements[i] for i in good])
            results.update(zip(good, answers, strict=True))
        return [results[i] for i in range(len(placements))]

    def process_row(self, row: Outputs, placement: Placement | None) -> RowResult:
        """Call the function for a batch of one."""
        copies = {name: np.array(array)[np.newaxis] for name, array in row.items()}
        return _to_row_result(self._function(copies, [placement], **self._options)[0])

    def _call(self, outputs: Outputs, placements: list[Placement | None]) -> list[FrameResult]:
        """Call the function on ``outputs``; it gets copies, because a second call must see them unchanged."""
        count = len(placements)
        try:
            copies = {name: np.array(array) for name, array in outputs.items()}
            items = self._function(copies, list(placements), **self._options)
        except Exception as error:  # noqa: BLE001 - user code: whatever it raises is a code
            if count == 1:
                return [self._failure(error)]
            return [
                self._call({name: array[i : i + 1] for name, array in outputs.items()}, [placement])[0]
                for i, placement in enumerate(placements)
            ]
        if not isinstance(items, list | tuple):
            wrong = AdapterError(f"expected a list of {count} results, got {type(items).__name__}")
            return [self._failure(wrong)] * count
        if len(items) != count:
            message = f"adapter {self.name}: expected {count} results for {count} frames, got {len(items)}"
            return [FrameResult(Status.ERROR, Code.RESULT_COUNT, message)] * count
        return [self._convert(item) for item in items]

    def _convert(self, item: object) -> FrameResult:
        try:
            return to_frame_result(_to_row_result(item))
        except AdapterError as error:
            return self._failure(error)


def load_function(name: str, options: Options) -> Adapter:
    """Import ``package.module:function`` and make an adapter of it.

    Raises ConfigError when it can't be imported or does not take the options.
    """
    module_name, _, attribute = name.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), attribute, None)
    except Exception as error:  # the module is user code: importing it may raise anything
        raise ConfigError(
            f"adapter {name}: module {module_name} can't be imported here: {type(error).__name__}: {error}"
        ) from error
    if not callable(function):
        raise ConfigError(f"adapter {name}: module {module_name} has no function {attribute}")
    is_per_frame = options.flag("per_frame", False)
    keywords = options.rest()
    try:
        inspect.signature(function).bind({}, None, **keywords)
    except TypeError as error:
        given = ", ".join(sorted(keywords)) or "none"
        raise ConfigError(
            f"adapter {name}: the function must take outputs, placements and its options (given: {given}):"
            f" {error}"
        ) from error
    return (PerFrameFunction if is_per_frame else BatchFunction)(name, function, keywords)


def _to_row_result(item: object) -> RowResult:
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], dict):
        value, tensors = item
        if tensors and all(isinstance(array, np.ndarray) for array in tensors.values()):
            return RowResult(value, tuple((str(name), array) for name, array in tensors.items()))
    return RowResult(item)
