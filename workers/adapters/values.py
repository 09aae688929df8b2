"""Convert what an adapter returns to what msgpack holds, before the batch meets the encoder.

A result must not die in the encoder after the device has done its work, so everything that can't be carried
is refused here, for its own frame, in words that name the place and the type.
"""

from __future__ import annotations

import numpy as np

from headrace.protocol.messages import Value

#: Nesting of one frame's value. The header around it adds three levels to it; the protocol allows 16.
MAX_VALUE_DEPTH = 12

#: Rough packed size of one frame's value. A thousand text boxes take about 90 kB; whatever is larger is
#: numbers in bulk and belongs into tensors, outside the header.
MAX_VALUE_BYTES = 128 * 1024

_NUMBER_BYTES = 9
_CONTAINER_BYTES = 5


def to_value(result: object) -> Value:
    """Return ``result`` made of None, bool, int, float, str, bytes, list and dict alone.

    numpy scalars become Python's, tuples and arrays become lists. Raises ValueError naming place and type
    for anything else, for keys that are no text, and beyond MAX_VALUE_DEPTH or MAX_VALUE_BYTES.
    """
    return None if result is None else _Converter().convert(result, "result", 0)


class _Converter:
    """Counts the bytes of one value while it is converted."""

    def __init__(self) -> None:
        self._nbytes = 0

    def convert(self, item: object, place: str, depth: int) -> Value:
        if depth > MAX_VALUE_DEPTH:
            raise ValueError(f"a result is nested deeper than {MAX_VALUE_DEPTH} levels")
        match item:
            case None | bool() | np.bool_():
                self._add(1)
                return None if item is None else bool(item)
            case int() | np.integer():
                return self._integer(int(item), place)
            case float() | np.floating():
                self._add(_NUMBER_BYTES)
                return float(item)
            case str():
                return self._text(item, place)
            case bytes() | bytearray() | memoryview():
                self._add(_CONTAINER_BYTES + len(item))
                return bytes(item)
            case np.ndarray():
                self._add(item.size)  # refused before it becomes a list, should it be huge
                return self.convert(item.tolist(), place, depth)
            case list() | tuple():
                self._add(_CONTAINER_BYTES)
                return [self.convert(inner, f"{place}[{i}]", depth + 1) for i, inner in enumerate(item)]
            case dict():
                return self._dict(item, place, depth)
            case _:
                raise ValueError(f"{place} is of type {type(item).__name__}, which can't be sent")

    def _dict(self, item: dict[object, object], place: str, depth: int) -> Value:
        self._add(_CONTAINER_BYTES)
        converted: dict[str, Value] = {}
        for key, inner in item.items():
            if not isinstance(key, str):
                raise ValueError(f"{place} has a key of type {type(key).__name__}: keys must be text")  # noqa: TRY004
            text = self._text(key, place)
            converted[text] = self.convert(inner, f"{place}.{text[:40]}", depth + 1)
        return converted

    def _integer(self, number: int, place: str) -> int:
        if not -(2**63) <= number < 2**64:
            raise ValueError(f"{place} is an integer of more than 64 bits")
        self._add(_NUMBER_BYTES)
        return number

    def _text(self, text: str, place: str) -> str:
        try:
            self._add(_CONTAINER_BYTES + len(text.encode()))
        except UnicodeEncodeError as error:
            raise ValueError(f"{place} is text that UTF-8 can't hold") from error
        return str(text)

    def _add(self, nbytes: int) -> None:
        self._nbytes += nbytes
        if self._nbytes > MAX_VALUE_BYTES:
            raise ValueError(f"a result is larger than {MAX_VALUE_BYTES} bytes: return bulk data as tensors")
