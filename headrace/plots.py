"""Line charts as one self-contained HTML page (inline SVG, no script, nothing loaded) and as PNG.

    chart = Chart("Latency", "offered rate (frames/s)", "latency (ms)", (Series("p99", points),))
    write(Path("curve.html"), "headrace bench", [chart, Table("Figures", ("rate", "p99"), rows), "A note."])

The page is well-formed XML, follows the reader's light or dark setting, prints, and shows the figures of a
point under the mouse. Series differ by colour, by marker and, beyond six, by dashes: colour alone is not read
by everybody. A PNG needs matplotlib (``pip install 'headrace[plot]'``) and holds the charts alone: call
``check`` before an hour of measuring, so that a missing library is told at once.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, assert_never

from headrace.errors import LocalError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES = (".html", ".png")

#: Size of a chart in its own units, and of the plot area's surroundings. A screen shows it about 1:1.
WIDTH, HEIGHT = 800, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 78, 24, 18, 58
_LEGEND_ROW = 22

#: Okabe and Ito's colours, which people with any colour vision can tell apart; darkened where white paper
#: asks for it, lightened where a dark page does.
_LIGHT = ("#0072b2", "#c14a00", "#007f5c", "#a8447f", "#7a6200", "#4a4a4a")
_DARK = ("#56b4e9", "#ff9d5c", "#3fd6a3", "#e79ac6", "#f0e442", "#c8c8c8")
_DASHES = ("", "7 4", "2 3")
_MARKER_COUNT = 5
_MARKER_SIZE = 4.0

#: About how many steps an axis has.
_STEPS = 6


class PlotError(LocalError):
    """A plot that can't be made: names the file and what is missing."""


@dataclass(frozen=True, slots=True)
class Series:
    """A line through ``points`` (x, y), drawn in their order. A point that is not finite (or not above zero
    on a logarithmic axis) is left out and interrupts the line. ``is_reference``: a thin dashed line without
    markers, for limits and ideals."""

    name: str
    points: tuple[tuple[float, float], ...]
    is_reference: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """One pair of axes. Labels name the unit. A linear y axis starts at zero."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    is_log_x: bool = False
    is_log_y: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """Figures beside the charts. ``rows`` have as many cells as ``columns``."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


Part = Chart | Table | str


def check(path: Path) -> None:
    """Raise PlotError if ``write`` could not write this file: its kind, its folder, a missing library."""
    if path.suffix.lower() not in SUFFIXES:
        raise PlotError(f"{path}: a plot is written as {' or '.join(SUFFIXES)}, by the file's name")
    if not path.absolute().parent.is_dir():
        raise PlotError(f"{path}: the folder {path.absolute().parent} is not there")
    if path.suffix.lower() == ".png" and importlib.util.find_spec("matplotlib") is None:
        raise PlotError(f"{path}: PNG needs matplotlib: pip install 'headrace[plot]', or name a .html file")


def write(path: Path, title: str, parts: Sequence[Part]) -> None:
    """Write an HTML page with all parts in order, or a PNG with the charts among them, by the file's name.

    Raises PlotError as ``check`` does, and OSError."""
    check(path)
    if path.suffix.lower() == ".html":
        path.write_text(page(title, parts), encoding="utf-8")
    else:
        _write_png(path, title, [part for part in parts if isinstance(part, Chart)])


def page(title: str, parts: Sequence[Part]) -> str:
    """Return a whole HTML page. A str among the parts is a paragraph of plain text."""
    body = "\n".join(_part(part) for part in parts)
    return (
        "<!DOCTYPE html>\n"
        '<html lang="en" xmlns="http://www.w3.org/1999/xhtml">\n<head>\n<meta charset="utf-8" />\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1" />\n'
        f"<title>{escape(title)}</title>\n<style>{_PAGE_STYLE}</style>\n</head>\n"
        f"<body>\n<h1>{escape(title)}</h1>\n{body}\n</body>\n</html>\n"
    )


def svg(chart: Chart) -> str:
    """Return one chart as an SVG element that carries its own style."""
    legend, legend_rows = _legend(chart.series)
    top = _TOP + legend_rows * _LEGEND_ROW
    height = HEIGHT + legend_rows * _LEGEND_ROW
    points = [point for each in chart.series for point in each.points if _is_drawn(point, chart)]
    inner = [f"<title>{escape(chart.title)}</title>", f"<style>{_CHART_STYLE}</style>", *legend]
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    if points:
        x = _Axis.over([px for px, _ in points], chart.is_log_x, (_LEFT, WIDTH - _RIGHT), from_zero=False)
        y = _Axis.over([py for _, py in points], chart.is_log_y, (height - _BOTTOM, top), from_zero=True)
        inner += _grid(x, y)
        for index, each in enumerate(chart.series):
            inner += _line(each, index, chart, x, y)
    else:
        inner.append(f'<text x="{middle}" y="{height / 2}" text-anchor="middle">nothing was measured</text>')
    inner.append(
        f'<text class="label" x="{middle}" y="{height - 14}" text-anchor="middle">'
        f"{escape(chart.x_label)}</text>"
    )
    center = (top + height - _BOTTOM) / 2
    inner.append(
        f'<text class="label" transform="translate(18 {center}) rotate(-90)" text-anchor="middle">'
        f"{escape(chart.y_label)}</text>"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {WIDTH} {height}" role="img"'
        f' aria-label="{escape(chart.title)}">\n' + "\n".join(inner) + "\n</svg>"
    )


# -- axes -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Axis:
    """Maps values onto ``span`` (from, to) in drawing units. ``ticks`` are ascending and its two ends."""

    ticks: tuple[float, ...]
    is_log: bool
    span: tuple[float, float]

    @classmethod
    def over(
        cls, values: Sequence[float], is_log: bool, span: tuple[float, float], *, from_zero: bool
    ) -> _Axis:
        low, high = min(values), max(values)
        if is_log:
            return cls(_log_ticks(low, high), True, span)
        if from_zero:
            low, high = min(low, 0.0), max(high, 0.0)
        return cls(_linear_ticks(low, high), False, span)

    def place(self, value: float) -> float:
        scale: Callable[[float], float] = math.log10 if self.is_log else float
        low, high = scale(self.ticks[0]), scale(self.ticks[-1])
        share = (scale(value) - low) / (high - low)
        return round(self.span[0] + share * (self.span[1] - self.span[0]), 2)


def _linear_ticks(low: float, high: float) -> tuple[float, ...]:
    if low == high:
        low, high = low - (abs(low) / 2 or 1), high + (abs(high) / 2 or 1)
    rough = (high - low) / _STEPS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return tuple(number * step for number in range(first, last + 1))


def _log_ticks(low: float, high: float) -> tuple[float, ...]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    # 1, 2, 5, 10 ... while they are few; powers of ten alone over many decades.
    fine = [factor * 10.0**power for power in range(first - 1, last + 2) for factor in (1, 2, 5)]
    start = max(index for index, value in enumerate(fine) if value <= low * 1.000001)
    end = min(index for index, value in enumerate(fine) if value >= high * 0.999999)
    if end == start:
        start, end = start - 1, end + 1
    if end - start <= 2 * _STEPS:
        return tuple(fine[start : end + 1])
    return tuple(10.0**power for power in range(first, last + 1))


def _is_drawn(point: tuple[float, float], chart: Chart) -> bool:
    x, y = point
    is_right = math.isfinite(x) and math.isfinite(y)
    return is_right and (x > 0 or not chart.is_log_x) and (y > 0 or not chart.is_log_y)


def _number(value: float) -> str:
    """Return a number as people read it: 12,500 or 0.05."""
    return f"{round(value, 9):,.10g}" if abs(value) >= 1 else f"{value:.3g}"


# -- SVG --------------------------------------------------------------------------------------------------


def _grid(x: _Axis, y: _Axis) -> list[str]:
    left, right = x.span
    bottom, top = y.span
    found = []
    for tick in y.ticks:
        at = y.place(tick)
        found.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{at}" y2="{at}" />')
        found.append(f'<text x="{left - 8}" y="{at + 4}" text-anchor="end">{_number(tick)}</text>')
    for tick in x.ticks:
        at = x.place(tick)
        found.append(f'<line class="grid" x1="{at}" x2="{at}" y1="{bottom}" y2="{top}" />')
        found.append(f'<text x="{at}" y="{bottom + 18}" text-anchor="middle">{_number(tick)}</text>')
    found.append(f'<path class="axis" d="M{left} {top}V{bottom}H{right}" />')
    return found


def _line(each: Series, index: int, chart: Chart, x: _Axis, y: _Axis) -> list[str]:
    steps: list[str] = []
    markers: list[str] = []
    command = "M"
    for point in each.points:
        if not _is_drawn(point, chart):
            command = "M"
            continue
        at_x, at_y = x.place(point[0]), y.place(point[1])
        steps.append(f"{command}{at_x} {at_y}")
        command = "L"
        if not each.is_reference:
            hint = f"{each.name}: {_number(point[0])}, {point[1]:,.4g}"
            markers.append(
                f'<path class="mark c{index % len(_LIGHT)}" d="{_marker(index, at_x, at_y)}">'
                f"<title>{escape(hint)}</title></path>"
            )
    if not steps:
        return []
    return [f'<path {_look(each, index)} d="{"".join(steps)}" />', *markers]


def _look(each: Series, index: int) -> str:
    if each.is_reference:
        return 'class="line reference"'
    dashes = _DASHES[index // len(_LIGHT) % len(_DASHES)]
    attribute = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'class="line c{index % len(_LIGHT)}"{attribute}'


def _marker(index: int, x: float, y: float) -> str:
    """Return the path of a marker around a point: circle, square, triangle, diamond, upside-down triangle."""
    s = _MARKER_SIZE
    match index % _MARKER_COUNT:
        case 0:
            return f"M{x - s:.2f} {y}a{s} {s} 0 1 0 {2 * s} 0a{s} {s} 0 1 0 {-2 * s} 0z"
        case 1:
            corners: Iterable[tuple[float, float]] = ((-s, -s), (s, -s), (s, s), (-s, s))
        case 2:
            corners = ((0, -1.2 * s), (1.2 * s, s), (-1.2 * s, s))
        case 3:
            corners = ((0, -1.4 * s), (1.4 * s, 0), (0, 1.4 * s), (-1.4 * s, 0))
        case _:
            corners = ((0, 1.2 * s), (1.2 * s, -s), (-1.2 * s, -s))
    return "M" + "L".join(f"{x + dx:.2f} {y + dy:.2f}" for dx, dy in corners) + "z"


def _legend(series: Sequence[Series]) -> tuple[list[str], int]:
    """Return the legend's elements and how many rows it takes."""
    found: list[str] = []
    x, row = float(_LEFT), 0
    for index, each in enumerate(series):
        width = 44 + 7.4 * len(each.name)  # 13 px letters are about 7 wide: a guess is enough to wrap by
        if x + width > WIDTH - _RIGHT and x > _LEFT:
            x, row = float(_LEFT), row + 1
        y = 16 + row * _LEGEND_ROW
        found.append(f'<path {_look(each, index)} d="M{x:.1f} {y}h28" />')
        if not each.is_reference:
            found.append(f'<path class="mark c{index % len(_LIGHT)}" d="{_marker(index, x + 14, y)}" />')
        found.append(f'<text x="{x + 34:.1f}" y="{y + 4}">{escape(each.name)}</text>')
        x += width + 12
    return found, row + 1 if series else 0


# -- the page ---------------------------------------------------------------------------------------------


def _part(part: Part) -> str:
    match part:
        case Chart():
            return f"<h2>{escape(part.title)}</h2>\n<figure>{svg(part)}</figure>"
        case Table():
            head = "".join(f"<th>{escape(name)}</th>" for name in part.columns)
            rows = "\n".join(
                "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in part.rows
            )
            return (
                f'<h2>{escape(part.title)}</h2>\n<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n'
                f"<tbody>\n{rows}\n</tbody>\n</table></div>"
            )
        case str():
            return f"<p>{escape(part)}</p>"
        case _:
            assert_never(part)


def _colors(colors: Sequence[str]) -> str:
    # No CSS variables: viewers of SVG files other than browsers do not know them.
    return "".join(
        f".chart .line.c{index}{{stroke:{color}}}.chart .mark.c{index}{{fill:{color}}}"
        for index, color in enumerate(colors)
    )


_CHART_STYLE = (
    ".chart{font:13px system-ui,sans-serif;color:#222}.chart text{fill:currentColor}"
    ".chart .label{font-weight:600}.chart .grid{stroke:#8884;stroke-width:1}"
    ".chart .axis{fill:none;stroke:currentColor;stroke-width:1.2}"
    ".chart .line{fill:none;stroke-width:2;stroke-linejoin:round}"
    ".chart .line.reference{stroke:#888;stroke-width:1.5;stroke-dasharray:5 5}"
    + _colors(_LIGHT)
    + "@media (prefers-color-scheme:dark){.chart{color:#ddd}"
    + _colors(_DARK)
    + "}"
)

_PAGE_STYLE = (
    ":root{color-scheme:light dark}body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;"
    "padding:0 1rem;color:#222;background:#fff}h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem}"
    "figure{margin:0}figure svg{width:100%;height:auto}.wide{overflow-x:auto}"
    "table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.9rem}"
    "th,td{padding:.25rem .7rem;text-align:right;border-bottom:1px solid #8884;white-space:nowrap}"
    "th:first-child,td:first-child{text-align:left}"
    "@media (prefers-color-scheme:dark){body{color:#ddd;background:#16181c}}"
)


# -- PNG --------------------------------------------------------------------------------------------------


def _write_png(path: Path, title: str, charts: Sequence[Chart]) -> None:
    if not charts:
        raise PlotError(f"{path}: there is no chart to draw")
    from matplotlib.figure import Figure

    # A figure of its own, not pyplot: pyplot keeps figures and looks for a display.
    figure = Figure(figsize=(8, 4.4 * len(charts)), layout="constrained")
    figure.suptitle(title)
    for number, chart in enumerate(charts, start=1):
        _draw(chart, figure.add_subplot(len(charts), 1, number))
    figure.savefig(path, format="png")


def _draw(chart: Chart, axes: Axes) -> None:
    axes.set_title(chart.title)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.grid(visible=True, alpha=0.3)
    for index, each in enumerate(chart.series):
        # A point that can't be drawn becomes NaN, which interrupts the line here too.
        drawn = [point if _is_drawn(point, chart) else (point[0], math.nan) for point in each.points]
        xs, ys = [x for x, _ in drawn], [y for _, y in drawn]
        if each.is_reference:
            axes.plot(xs, ys, color="#888888", linestyle="--", linewidth=1.2, label=each.name)
        else:
            color, marker = _LIGHT[index % len(_LIGHT)], "os^Dv"[index % _MARKER_COUNT]
            style = ("-", "--", ":")[index // len(_LIGHT) % len(_DASHES)]
            axes.plot(
                xs,
                ys,
                color=color,
                marker=marker,
                linestyle=style,
                markersize=5,
                label=each.name,
                clip_on=False,
            )
    points = [point for each in chart.series for point in each.points if _is_drawn(point, chart)]
    if not points:
        return
    axes.legend()
    span = (0.0, 1.0)
    x = _Axis.over([px for px, _ in points], chart.is_log_x, span, from_zero=False)
    y = _Axis.over([py for _, py in points], chart.is_log_y, span, from_zero=True)
    for axis, set_scale, set_ticks, set_limits in (
        (x, axes.set_xscale, axes.set_xticks, axes.set_xlim),
        (y, axes.set_yscale, axes.set_yticks, axes.set_ylim),
    ):
        set_scale("log" if axis.is_log else "linear")
        set_ticks(axis.ticks, labels=[_number(tick) for tick in axis.ticks])
        set_ticks([], minor=True)
        set_limits(axis.ticks[0], axis.ticks[-1])
