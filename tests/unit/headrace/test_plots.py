"""Plots: pages that parse, scales that hold every point, and what can't be written is told beforehand."""

from __future__ import annotations

import importlib.util
import math
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from headrace import plots
from headrace.plots import Chart, PlotError, Series, Table

SVG = "{http://www.w3.org/2000/svg}"
XHTML = "{http://www.w3.org/1999/xhtml}"

RATES = (500.0, 1_000.0, 2_000.0)
P50 = Series("p50", tuple(zip(RATES, (3.0, 4.0, 9.0), strict=True)))
P99 = Series("p99 of <all> & more", tuple(zip(RATES, (8.0, 11.0, 90.0), strict=True)))
LIMIT = Series("limit", ((500.0, 50.0), (2_000.0, 50.0)), is_reference=True)
CHART = Chart("Latency", "offered rate (frames/s)", "latency (ms)", (P50, P99, LIMIT), is_log_y=True)

values = st.floats(1e-6, 1e9)


def texts(root: ET.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def marks(root: ET.Element) -> list[ET.Element]:
    """The markers that stand for points: those of the legend have no hint."""
    return [e for e in root.iter(f"{SVG}path") if e.find(f"{SVG}title") is not None]


def test_a_page_is_well_formed_and_holds_every_part(tmp_path: Path) -> None:
    """Names and cells with markup in them stay text, and nothing is loaded from elsewhere."""
    path = tmp_path / "curve.html"

    plots.write(
        path, "bench <1>", [CHART, Table("Figures", ("rate", "<p99>"), (("500", "8 & more"),)), "a < b"]
    )

    root = ET.parse(path).getroot()
    assert root.tag == f"{XHTML}html"
    assert [e.text for e in root.iter(f"{XHTML}td")] == ["500", "8 & more"]
    assert [e.text for e in root.iter(f"{XHTML}p")] == ["a < b"]
    assert "p99 of <all> & more" in texts(root)
    text = path.read_text()
    assert "prefers-color-scheme:dark" in text
    assert "<script" not in text
    assert text.count("http") == text.count("http://www.w3.org/")


def test_a_chart_labels_both_axes_and_shows_each_point() -> None:
    """Units stand at the axes; each point tells its figures; a limit is a line without points."""
    root = ET.fromstring(plots.svg(CHART))

    assert {"offered rate (frames/s)", "latency (ms)", "limit", "500", "2,000", "100"} <= set(texts(root))
    hints = [mark.findtext(f"{SVG}title") for mark in marks(root)]
    assert len(hints) == 6
    assert hints[5] == "p99 of <all> & more: 2,000, 90"


@pytest.mark.parametrize("gap", [math.nan, math.inf, 0.0, -1.0])
def test_a_point_that_can_not_be_drawn_interrupts_the_line(gap: float) -> None:
    """No line is drawn through a figure that was not measured."""
    broken = Series("p99", ((1.0, 5.0), (2.0, gap), (3.0, 7.0)))

    root = ET.fromstring(plots.svg(Chart("c", "x", "y", (broken,), is_log_y=True)))

    assert len(marks(root)) == 2
    lines = [e.get("d", "") for e in root.iter(f"{SVG}path") if "line" in e.get("class", "")]
    assert any(line.count("M") == 2 and "L" not in line for line in lines)


@pytest.mark.parametrize("series", [(), (Series("p50", ()),), (Series("p50", ((1.0, math.nan),)),)])
def test_a_chart_without_figures_says_so(series: tuple[Series, ...]) -> None:
    """An empty run still makes a page."""
    assert "nothing was measured" in texts(ET.fromstring(plots.svg(Chart("c", "x", "y", series))))


def test_eighteen_series_look_different() -> None:
    """Colour, dashes and marker together name a series."""
    many = tuple(Series(f"policy {n}", ((0.0, n), (1.0, n + 1.0))) for n in range(18))

    root = ET.fromstring(plots.svg(Chart("c", "x", "y", many)))

    looks = [
        (e.get("class"), e.get("stroke-dasharray"))
        for e in root.iter(f"{SVG}path")
        if "line" in e.get("class", "") and "h28" in e.get("d", "")
    ]
    assert len(set(looks)) == 18


@given(st.lists(st.tuples(values, values), min_size=1, max_size=20), st.booleans(), st.booleans())
def test_every_point_lies_inside_the_axes(
    points: list[tuple[float, float]], is_log_x: bool, is_log_y: bool
) -> None:
    """Whatever the figures, the scale holds them, rises, and has a readable number of ticks."""
    for index, is_log, from_zero in ((0, is_log_x, False), (1, is_log_y, True)):
        figures = [point[index] for point in points]

        axis = plots._Axis.over(figures, is_log, (0.0, 100.0), from_zero=from_zero)

        assert 2 <= len(axis.ticks) <= 20
        assert list(axis.ticks) == sorted(set(axis.ticks))
        assert all(-0.01 <= axis.place(value) <= 100.01 for value in figures)


def test_a_page_of_any_numbers_parses() -> None:
    """Zero, negative, equal and huge figures all have a scale."""
    for points in (((0.0, 0.0),), ((-5.0, -5.0), (5.0, 5.0)), ((1e12, 1e-12), (2e12, 3.0))):
        ET.fromstring(plots.svg(Chart("c", "x", "y", (Series("s", points),))))


def test_png_is_an_image_of_all_charts(tmp_path: Path) -> None:
    """One picture, one chart below the other."""
    path = tmp_path / "curve.PNG"

    plots.write(path, "bench", [CHART, "left out", Chart("empty", "x", "y", ())])

    with Image.open(path) as image:
        image.load()
        assert image.format == "PNG"
        assert image.height > image.width


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("curve.pdf", ".html or .png"),
        ("curve", ".html or .png"),
        ("nowhere/curve.html", "nowhere is not there"),
    ],
)
def test_what_can_not_be_written_is_told_before(tmp_path: Path, name: str, words: str) -> None:
    """Nobody measures for an hour to learn that the plot has nowhere to go."""
    with pytest.raises(PlotError, match=words):
        plots.check(tmp_path / name)


def test_png_without_its_library_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way out is in the message: install the extra, or write HTML."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)

    plots.check(tmp_path / "curve.html")
    with pytest.raises(PlotError, match=r"pip install 'headrace\[plot\]'"):
        plots.check(tmp_path / "curve.png")


def test_a_png_of_no_charts_is_refused(tmp_path: Path) -> None:
    """A picture of nothing would look like a result."""
    with pytest.raises(PlotError, match="no chart"):
        plots.write(tmp_path / "curve.png", "bench", ["text alone"])
