"""Checks of single header fields: each takes a peer's value and returns it typed, or refuses it.

A *reader* is a function ``(value, name) -> checked value``; ``name`` is how the field is called in the
error text. Readers compose (``array_of(text(32), 8)``). They serve the messages that come once per peer
or once per batch; the ones that come per frame are checked by hand in ``frames`` and ``results``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import StrEnum
from typing import Any, Final, TypeAlias, TypeVar

from headrace.errors import Code, RemoteProtocolError
from headrace.protocol.messages import Value

T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)

Reader: TypeAlias = Callable[[object, str], T]

U64_MAX: Final = 2**64 - 1
U32_MAX: Final = 2**32 - 1
I64_MAX: Final = 2**63 - 1
I64_MIN: Final = -(2**63)

#: Longest text of a name (model, worker, size class, code, flag): longer ones are a mistake or an attack.
MAX_NAME_CHARACTERS: Final = 256
#: Longest explanation in a message. Our own senders cut theirs (``cut_text``).
MAX_TEXT_CHARACTERS: Final = 2048
#: Longest address or path: Linux's PATH_MAX.
MAX_PATH_CHARACTERS: Final = 4096
#: Longest topic id; the wire promises 1 to 128 bytes.
MAX_STREAM_BYTES: Final = 128

_SHOWN_CHARACTERS: Final = 48


def shown(value: object) -> str:
    """Return a peer's value as it is quoted in an error: short, escaped, whatever it is."""
    if isinstance(value, str):
        return repr(value[:_SHOWN_CHARACTERS]) + ("..." if len(value) > _SHOWN_CHARACTERS else "")
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return f"a map of {len(value)}"
    return f"{len(value)} bytes" if isinstance(value, bytes | memoryview) else type(value).__name__


def bad_field(name: str, wanted: str, value: object) -> RemoteProtocolError:
    return RemoteProtocolError(Code.BAD_FIELD, f"{name} must be {wanted}, got {shown(value)}")


def out_of_range(name: str, low: object, high: object, value: object) -> RemoteProtocolError:
    return RemoteProtocolError(Code.OUT_OF_RANGE, f"{name} must be {low} to {high}, got {shown(value)}")


def missing_field(name: str) -> RemoteProtocolError:
    return RemoteProtocolError(Code.MISSING_FIELD, f"{name} is missing")


def cut_text(text: str) -> str:
    """Return a text that every peer accepts: explanations are cut, never refused, at their sender."""
    return text if len(text) <= MAX_TEXT_CHARACTERS else text[: MAX_TEXT_CHARACTERS - 3] + "..."


def integer(low: int, high: int) -> Reader[int]:
    def read(value: object, name: str) -> int:
        if type(value) is not int:  # a bool is not a number here
            raise bad_field(name, "an integer", value)
        if not low <= value <= high:
            raise out_of_range(name, low, high, value)
        return value

    return read


def number(low: float, high: float) -> Reader[float]:
    def read(value: object, name: str) -> float:
        if type(value) is not float and type(value) is not int:
            raise bad_field(name, "a number", value)
        if not math.isfinite(value) or not low <= value <= high:
            raise out_of_range(name, low, high, value)
        return float(value)

    return read


def boolean(value: object, name: str) -> bool:
    if type(value) is not bool:
        raise bad_field(name, "true or false", value)
    return value


def text(max_characters: int, min_characters: int = 0) -> Reader[str]:
    def read(value: object, name: str) -> str:
        if type(value) is not str:
            raise bad_field(name, "text", value)
        if not min_characters <= len(value) <= max_characters:
            raise RemoteProtocolError(
                Code.OUT_OF_RANGE,
                f"{name} must have {min_characters} to {max_characters} characters, it has {len(value)}",
            )
        return value

    return read


def choice(kind: type[E]) -> Reader[E]:
    members = {member.value: member for member in kind}

    def read(value: object, name: str) -> E:
        member = members.get(value) if type(value) is str else None
        if member is None:
            raise bad_field(name, f"one of {', '.join(members)}", value)
        return member

    return read


def array_of(read_item: Reader[T], max_items: int) -> Reader[tuple[T, ...]]:
    def read(value: object, name: str) -> tuple[T, ...]:
        if type(value) is not list:
            raise bad_field(name, "an array", value)
        if len(value) > max_items:
            raise RemoteProtocolError(
                Code.OUT_OF_RANGE, f"{name} must have at most {max_items} items, it has {len(value)}"
            )
        return tuple([read_item(item, f"{name}[{index}]") for index, item in enumerate(value)])

    return read


def map_of(read_key: Reader[str], read_value: Reader[T]) -> Reader[dict[str, T]]:
    """Read a map. How many entries it can have is bounded by the header's size."""

    def read(value: object, name: str) -> dict[str, T]:
        if type(value) is not dict:
            raise bad_field(name, "a map", value)
        return {
            read_key(key, f"a key of {name}"): read_value(item, f"{name}[{shown(key)}]")
            for key, item in value.items()
        }

    return read


def optional(read_present: Reader[T]) -> Reader[T | None]:
    """Accept nil as "left out": producers in other languages often write the key with no value."""

    def read(value: object, name: str) -> T | None:
        return None if value is None else read_present(value, name)

    return read


def pair(read_first: Reader[Any], read_second: Reader[Any]) -> Reader[tuple[Any, Any]]:
    def read(value: object, name: str) -> tuple[Any, Any]:
        if type(value) is not list or len(value) != 2:
            raise bad_field(name, "an array of two", value)
        return read_first(value[0], f"{name}[0]"), read_second(value[1], f"{name}[1]")

    return read


_CONTAINERS: Final = frozenset((list, dict))


def has_more_items(value: object, limit: int) -> bool:
    """Tell whether a tree has more values than ``limit``; looks at no more than it has to."""
    pending: list[Any] = [value] if type(value) in _CONTAINERS else []
    seen = 0
    for container in pending:  # grows while it is read
        seen += len(container)
        if seen > limit:
            return True
        items = container.values() if type(container) is dict else container
        pending.extend([item for item in items if type(item) in _CONTAINERS])
    return False


def tree(value: object, name: str) -> Value:
    """Read any msgpack value. Depth was bounded by the walk over the whole header; what is left to
    refuse is a map with bytes for a key, which msgpack allows and JSON, say, does not."""
    if type(value) in _CONTAINERS:
        pending: list[Any] = [value]
        for container in pending:  # grows while it is read
            if type(container) is dict:
                for key, item in container.items():
                    if type(key) is not str:
                        raise bad_field(f"a key inside {name}", "text", key)
                    if type(item) in _CONTAINERS:
                        pending.append(item)
            else:
                pending.extend([item for item in container if type(item) in _CONTAINERS])
    return value  # type: ignore[return-value]  # msgpack makes nothing but Values of these


def tree_map(value: object, name: str) -> dict[str, Value]:
    if type(value) is not dict:
        raise bad_field(name, "a map", value)
    return tree(value, name)  # type: ignore[return-value]  # a Value that is a dict


u64: Final = integer(0, U64_MAX)
count: Final = integer(0, U32_MAX)
positive: Final = integer(1, U32_MAX)
name_text: Final = text(MAX_NAME_CHARACTERS)
required_name: Final = text(MAX_NAME_CHARACTERS, 1)
long_text: Final = text(MAX_TEXT_CHARACTERS)
path_text: Final = text(MAX_PATH_CHARACTERS)


def stream_id(value: object, name: str) -> str:
    """Read a stream id: 1 to 128 bytes of UTF-8 without NUL, which ends a topic."""
    if type(value) is not str:
        raise RemoteProtocolError(Code.BAD_STREAM, f"{name} must be text, got {shown(value)}")
    # One of more characters than a stream id has bytes is too long however it is written.
    is_counted = value.isascii() or len(value) > MAX_STREAM_BYTES
    size_bytes = len(value) if is_counted else len(value.encode("utf-8"))
    if not 1 <= size_bytes <= MAX_STREAM_BYTES:
        raise RemoteProtocolError(
            Code.BAD_STREAM, f"{name} must have 1 to {MAX_STREAM_BYTES} bytes of UTF-8, it has {size_bytes}"
        )
    if "\0" in value:
        raise RemoteProtocolError(Code.BAD_STREAM, f"{name} must not contain NUL, got {shown(value)}")
    return value
