"""Charts: every point lands where the axes say, gaps stay gaps, and names cannot inject markup."""

import math
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from opendm.eval.charts import (
    Axis,
    Series,
    line_chart,
    linear_ticks,
    log_ticks,
    tick_labels,
    value_range,
)

LABELS = {"title": "t", "x_label": "x", "y_label": "y"}
HOSTILE = "</text><script>alert(1)</script>\"' onload=x&"


class Chart(HTMLParser):
    """Paths and texts of a chart, with a check that every tag is closed in order."""

    def __init__(self, svg):
        super().__init__()
        self.open, self.tags, self.texts, self.paths = [], set(), [], []
        self.feed(svg)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)
        if tag == "path":
            self.paths.append(dict(attrs))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def lines(svg, colour):
    """Runs of points of the one line that has this colour."""
    (path,) = [p for p in Chart(svg).paths if p["stroke"] == colour]
    runs = [run.split("h")[0].split("L") for run in path["d"].split("M")[1:]]
    return [[tuple(map(float, point.split())) for point in run] for run in runs]


def test_missing_values_break_the_line_and_a_lone_point_stays_visible():
    y = [1.0, 2.0, None, 3.0, math.nan, 1.0, 2.0, math.inf, 4.0]
    svg = line_chart([Series("a", range(9), y, "red")], **LABELS)
    assert [len(run) for run in lines(svg, "red")] == [2, 1, 2, 1]
    assert "nan" not in svg
    assert "inf" not in svg
    assert "h0" in svg


def test_missing_x_breaks_the_line_too():
    svg = line_chart([Series("a", [0, None, 2, 3], [1, 2, 3, 4], "red")], **LABELS)
    assert [len(run) for run in lines(svg, "red")] == [1, 2]


@pytest.mark.parametrize("log_y", [False, True])
@pytest.mark.parametrize("y", [[], [None, None], [math.nan, math.inf]])
def test_a_chart_without_data_says_so(y, log_y):
    svg = line_chart([Series("a", range(len(y)), y)], log_y=log_y, **LABELS)
    assert "no data" in Chart(svg).texts


def test_a_logarithmic_axis_spaces_decades_evenly_and_drops_zero_and_below():
    y = [0.0, 1e-3, 1e-2, 1e-1, -1.0, 1.0]
    svg = line_chart([Series("a", range(6), y, "red")], log_y=True, **LABELS)
    (first, second) = lines(svg, "red")
    heights = [height for _, height in first]
    assert len(first) == 3
    assert len(second) == 1
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.2)


def test_every_point_lies_inside_the_plot_and_higher_values_lie_higher():
    y = np.array([-5.0, 0.0, 7.0, 300.0])
    svg = line_chart([Series("a", np.arange(4), y, "red")], width=400, height=200, **LABELS)
    (run,) = lines(svg, "red")
    assert all(0 < x < 400 and 0 < y < 200 for x, y in run)
    assert [y for _, y in run] == sorted((y for _, y in run), reverse=True)
    assert [x for x, _ in run] == sorted(x for x, _ in run)


def test_text_is_escaped_everywhere():
    series = [Series(HOSTILE, [0, 1], [0, 1], HOSTILE), Series("b", [0, 1], [1, 0])]
    chart = Chart(line_chart(series, title=HOSTILE, x_label=HOSTILE, y_label=HOSTILE))
    assert chart.tags == {"svg", "text", "path", "title"}
    assert chart.texts.count(HOSTILE) == 5  # title, both axes, legend, tooltip
    assert all("onload" not in path for path in chart.paths)


def test_the_legend_names_every_line_and_wraps_into_the_width():
    series = [Series(f"a rather long name {i}", [0, 1], [i, 1], dashed=i == 2) for i in range(5)]
    svg = line_chart(series, width=400, **LABELS)
    assert all(f">a rather long name {i}</text>" in svg for i in range(5))
    assert max(float(x) for x in re.findall(r' x="([\d.]+)"', svg)) < 400
    assert svg.count("stroke-dasharray") == 2  # the line and its legend key
    strokes = {p["stroke"] for p in Chart(svg).paths if p["stroke"] != "currentColor"}
    assert len(strokes) == 5


def test_lines_of_unequal_length_are_refused():
    with pytest.raises(ValueError, match="zip"):
        line_chart([Series("a", [0, 1], [0])], **LABELS)


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (-3.7, 12), (1e-6, 3e-5), (0, 30000), (1e6, 1e6 + 4), (-1e9, 1e9)]
)
def test_linear_ticks_are_round_evenly_spaced_few_and_told_apart(low, high):
    ticks = linear_ticks(low, high)
    steps = np.diff(ticks)
    assert 3 <= len(ticks) <= 8
    assert low <= min(ticks)
    assert max(ticks) <= high
    np.testing.assert_allclose(steps, steps[0], rtol=1e-6)
    assert f"{steps[0]:.5e}"[0] in "125"
    labels = tick_labels(ticks)
    assert len(set(labels)) == len(ticks)
    np.testing.assert_allclose([float(label) for label in labels], ticks, atol=steps[0] * 1e-3)


@pytest.mark.parametrize(
    ("low", "high"), [(0.31, 0.34), (0.2, 3), (0.02, 9), (1e-4, 20), (1e-30, 1)]
)
def test_log_ticks_are_few_and_inside_and_told_apart(low, high):
    ticks = log_ticks(low, high)
    assert 3 <= len(ticks) <= 10
    assert low <= min(ticks)
    assert max(ticks) <= high
    labels = tick_labels(ticks)
    assert len(set(labels)) == len(ticks)
    np.testing.assert_allclose([float(label) for label in labels], ticks, rtol=1e-5)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("value", [1e-12, 0.3, 1.0, 5e8])
def test_a_constant_gets_a_range_around_it(value, log):
    low, high = value_range([value, value], 0.05, log=log)
    assert low < value < high


@pytest.mark.parametrize("is_log", [False, True])
def test_an_axis_maps_its_limits_onto_its_ends(is_log):
    axis = Axis(0.5, 80.0, 200.0, 20.0, is_log=is_log)
    assert axis.place(0.5) == pytest.approx(200.0)
    assert axis.place(80.0) == pytest.approx(20.0)
