"""What a batch costs in a simulated world, and where that is read from.

A cost is a formula (``base_ms + per_frame_ms * frames``, as of the ``emulated`` engine) or measured
milliseconds per bucket, as workers report them; a batch then takes the time of the smallest bucket that holds
it. Sources: ``models.emulated`` of a configuration, or a profile file. A profile file is what ``headrace
status --json`` printed, or TOML with ``[[costs]]`` tables.
"""

from __future__ import annotations

import json
import tomllib
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError
from headrace.protocol.messages import ModelSpec, SizeClassSpec
from headrace.workers.measure import buckets_up_to

#: A profile is a status of a pool or written by hand; one of 64 MiB is a wrong file.
MAX_PROFILE_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Formula:
    """T(b) = base_ms + per_frame_ms * b."""

    base_ms: float
    per_frame_ms: float

    def run_ns(self, count: int) -> int:
        """Return the time of a batch of ``count`` frames."""
        return round((self.base_ms + self.per_frame_ms * count) * 1e6)

    def buckets(self, max_batch_size: int) -> tuple[tuple[int, float], ...]:
        """Return (batch size, milliseconds), ascending, as a worker would say in READY."""
        return tuple((size, self.run_ns(size) / 1e6) for size in buckets_up_to(max_batch_size))


@dataclass(frozen=True, slots=True)
class Measured:
    """Milliseconds per bucket, ascending by bucket; at least one."""

    sizes: tuple[int, ...]
    ms: tuple[float, ...]

    def run_ns(self, count: int) -> int:
        """Return the time of the smallest bucket that holds ``count`` frames; beyond the largest bucket, that
        one's time in proportion."""
        index = bisect_left(self.sizes, count)
        if index < len(self.sizes):
            return round(self.ms[index] * 1e6)
        return round(self.ms[-1] * 1e6 * count / self.sizes[-1])

    def buckets(self, max_batch_size: int) -> tuple[tuple[int, float], ...]:
        """See Formula.buckets."""
        kept = [(size, ms) for size, ms in zip(self.sizes, self.ms, strict=True) if size < max_batch_size]
        return (*kept, (max_batch_size, self.run_ns(max_batch_size) / 1e6))


Cost = Formula | Measured


@dataclass(frozen=True, slots=True)
class ProfileEntry:
    """The cost of one size class. ``model`` "" stands for any."""

    model: str
    size_class: SizeClassSpec
    cost: Cost


class Costs:
    """Finds the cost of each class that a configuration serves."""

    def __init__(self, entries: Sequence[ProfileEntry] = (), default: Formula | None = None) -> None:
        """``default`` is for classes that no entry and no model describes."""
        self._entries = tuple(entries)
        self._default = default

    def classes_of(self, spec: ModelSpec) -> tuple[SizeClassSpec, ...]:
        """Return the size classes of a model: its own, else those that the profile describes.

        Raises ConfigError when neither has any."""
        if spec.size_classes:
            return spec.size_classes
        found = tuple(entry.size_class for entry in self._measured(spec))
        if not found:
            raise ConfigError(
                f"model {spec.name}: its size classes are not known without its graph: write them as"
                " [[models.size_classes]], or give a --profile of a running pool (`headrace status --json`)"
            )
        return found

    def of(self, spec: ModelSpec, size_class: SizeClassSpec) -> Cost:
        """Return what batches of a class cost.

        The profile's entry for the class; else of the two entries next to it by area the line between them
        (outside, in proportion to the nearest); else ``models.emulated``; else the default. Raises
        ConfigError when none of them is there.
        """
        measured = self._measured(spec)
        entry = _find(measured, size_class)
        if entry is not None:
            return entry.cost
        if measured:
            return _between(measured, size_class)
        if spec.emulated is not None:
            return Formula(spec.emulated.base_ms, spec.emulated.per_frame_ms)
        if self._default is not None:
            return self._default
        raise ConfigError(
            f"model {spec.name}, size class {size_class.name}: nothing says what a batch costs: give"
            " --profile FILE (`headrace status --json` of a pool, or [[costs]] tables), --cost"
            " BASE+PER_FRAME, or [models.emulated] in the configuration"
        )

    def is_estimated(self, spec: ModelSpec, size_class: SizeClassSpec) -> bool:
        """True when the profile has other classes of the model, but not this one."""
        measured = self._measured(spec)
        return bool(measured) and _find(measured, size_class) is None

    def _measured(self, spec: ModelSpec) -> list[ProfileEntry]:
        return [entry for entry in self._entries if entry.model in ("", spec.name)]


def _find(entries: Sequence[ProfileEntry], size_class: SizeClassSpec) -> ProfileEntry | None:
    for entry in entries:
        known = entry.size_class
        if (known.height, known.width) == (size_class.height, size_class.width):
            return entry
    return None


def _between(entries: Sequence[ProfileEntry], size_class: SizeClassSpec) -> Measured:
    """Estimate a class that was not measured from those that were, bucket by bucket, linear in the area."""
    ordered = sorted(entries, key=lambda entry: entry.size_class.height * entry.size_class.width)
    areas = [entry.size_class.height * entry.size_class.width for entry in ordered]
    area = size_class.height * size_class.width
    above = bisect_left(areas, area)
    sizes = buckets_up_to(size_class.max_batch_size)
    ms = []
    for size in sizes:
        if above == 0:
            value = ordered[0].cost.run_ns(size) * area / areas[0]
        elif above == len(areas):
            value = ordered[-1].cost.run_ns(size) * area / areas[-1]
        else:
            low, high = ordered[above - 1].cost.run_ns(size), ordered[above].cost.run_ns(size)
            share = (area - areas[above - 1]) / max(areas[above] - areas[above - 1], 1)
            value = low + (high - low) * share
        ms.append(value / 1e6)
    return Measured(sizes, tuple(ms))


def parse_formula(text: str) -> Formula:
    """Return the formula that "2.0+0.15" means: milliseconds of a batch plus milliseconds of each frame.

    Raises ValueError."""
    base, plus, per_frame = text.partition("+")
    formula = Formula(float(base), float(per_frame) if plus else 0.0)
    if not (0 <= formula.base_ms < 1e7 and 0 <= formula.per_frame_ms < 1e7) or not any(
        (formula.base_ms, formula.per_frame_ms)
    ):
        raise ValueError(f"{text!r}: expected two numbers of milliseconds from 0, not both 0")
    return formula


def read_profile(path: Path) -> tuple[ProfileEntry, ...]:
    """Read a profile file. Raises ConfigError that names the entry that can't be used."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_PROFILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"{path}: can't be read ({error.strerror}): give --profile an existing file"
        ) from None
    if len(data) > MAX_PROFILE_BYTES:
        raise ConfigError(f"{path}: is larger than {MAX_PROFILE_BYTES} bytes: that is no profile")
    try:
        text = data.decode()
        document = json.loads(text) if text.lstrip().startswith("{") else tomllib.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path}: neither JSON nor TOML: {error}") from None
    key = "classes" if "classes" in document else "costs"
    tables = document.get(key)
    if not isinstance(tables, list):
        raise ConfigError(
            f"{path}: holds neither the `classes` of `headrace status --json` nor [[costs]] tables"
        )
    entries = []
    for number, table in enumerate(tables):
        if key == "classes" and isinstance(table, dict) and not table.get("run_ms"):
            continue  # a class that no worker serves yet
        try:
            entries.append(_entry(table))
        except (KeyError, TypeError, ValueError) as error:
            reason = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
            raise ConfigError(f"{path}: {key}[{number}]: {reason}") from None
    if not entries:
        raise ConfigError(f"{path}: no class in it has measured times (run_ms): was a worker ready?")
    return tuple(entries)


def _entry(table: dict[str, Any]) -> ProfileEntry:
    height, width = int(table["height"]), int(table["width"])
    if min(height, width) < 0:
        raise ValueError(f"{height}x{width} is no size")
    name = str(table.get("size_class") or f"{height}x{width}")
    cost: Cost
    if "run_ms" in table:
        pairs = sorted((int(size), float(ms)) for size, ms in table["run_ms"])
        if not pairs or pairs[0][0] < 1 or not all(0 < ms < 1e7 for _, ms in pairs):
            raise ValueError(f"run_ms = {table['run_ms']}: expected [[batch size, milliseconds], ...]")
        cost = Measured(tuple(size for size, _ in pairs), tuple(ms for _, ms in pairs))
        largest = pairs[-1][0]
    else:
        cost = parse_formula(f"{float(table['base_ms'])}+{float(table['per_frame_ms'])}")
        largest = int(table.get("max_batch_size", 8))
    size_class = SizeClassSpec(name, height, width, largest)
    return ProfileEntry(str(table.get("model", "")), size_class, cost)
