"""Read an adapter's options: every key known, every value in its range, each error naming the key."""

from __future__ import annotations

from headrace.errors import ConfigError
from headrace.protocol.messages import Value


class Options:
    """The ``adapter_options`` of one model. Read each known key, then ``finish``.

    Every error is a ConfigError that names adapter, key and value.
    """

    def __init__(self, adapter: str, values: dict[str, Value]) -> None:
        self._adapter = adapter
        self._values = values
        self._known: list[str] = []

    def number(self, key: str, default: float, low: float, high: float) -> float:
        """Return a number in [low, high]."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise self._bad(key, value, f"a number from {low} to {high}")
        return float(value)

    def integer(self, key: str, default: int, low: int, high: int) -> int:
        """Return a whole number in [low, high]."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self._bad(key, value, f"a whole number from {low} to {high}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._bad(key, value, "true or false")
        return value

    def choice(self, key: str, default: str, choices: tuple[str, ...]) -> str:
        """Return one of ``choices``."""
        value = self._get(key, default)
        if value not in choices or not isinstance(value, str):
            raise self._bad(key, value, f"one of {', '.join(choices)}")
        return value

    def text(self, key: str, default: str) -> str:
        """Return a text."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._bad(key, value, "a text")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of texts, empty by default."""
        value = self._get(key, [])
        if not isinstance(value, list):
            raise self._bad(key, value, "a list of texts")
        texts = tuple(item for item in value if isinstance(item, str))
        if len(texts) != len(value):
            raise self._bad(key, value, "a list of texts")
        return texts

    def rest(self) -> dict[str, Value]:
        """Return the options that were not read."""
        return {key: value for key, value in self._values.items() if key not in self._known}

    def finish(self) -> None:
        """Raise ConfigError when an option was given that nobody read."""
        unknown = sorted(self.rest())
        if unknown:
            known = ", ".join(self._known) or "none"
            raise ConfigError(
                f"adapter {self._adapter}: unknown option {', '.join(unknown)}: known options are {known}"
            )

    def _get(self, key: str, default: Value) -> Value:
        self._known.append(key)
        return self._values.get(key, default)

    def _bad(self, key: str, value: Value, expected: str) -> ConfigError:
        return ConfigError(f"adapter {self._adapter}: {key} = {value!r}: expected {expected}")
