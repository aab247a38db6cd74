"""Charts."""

import math
import xml.etree.ElementTree as ET

import pytest

from rl_metrics.names import METRICS
from rl_metrics.panels import PANELS, Line, Panel, Series
from rl_metrics.svg import line_chart
from rl_metrics.svg_axes import number

PANEL = Panel(title="A & <b>", unit="s", lines=(Line(metric="x", label="x"),), from_zero=True)
LOG = Panel(title="L", unit="nats", lines=(Line(metric="x", label="x"),), scale="log")


def chart(panel: Panel, *values: float, label: str = "x") -> ET.Element:
    series = Series(label=label, steps=tuple(range(len(values))), values=values)
    return ET.fromstring(line_chart(panel, [series], width=356, height=134))  # noqa: S314 - ours


def points(svg: ET.Element) -> list[list[tuple[float, float]]]:
    return [
        [
            (float(x), float(y))
            for x, y in (point.split(",") for point in line.attrib["points"].split())
        ]
        for line in svg.iter("polyline")
    ]


def labels(svg: ET.Element) -> list[str]:
    return [text.text or "" for text in svg.iter("text")]


def test_points_stand_where_their_values_are() -> None:
    """The plot area is 300 by 100 from (46, 10): 0, 5, 10 go from the bottom to the top."""
    svg = chart(PANEL, 0.0, 5.0, 10.0)
    assert points(svg) == [[(46.0, 110.0), (196.0, 60.0), (346.0, 10.0)]]
    assert labels(svg) == ["0", "2", "4", "6", "8", "10", "0", "1", "2"]


def test_a_logarithmic_axis_has_equal_steps_per_factor() -> None:
    """0.01, 0.1 and 1 are equally far apart."""
    svg = chart(LOG, 0.01, 0.1, 1.0)
    assert [y for _, y in points(svg)[0]] == [110.0, 60.0, 10.0]
    assert labels(svg)[:3] == ["0.01", "0.1", "1"]


def test_a_gap_stands_where_a_value_is_missing() -> None:
    """NaN and infinity, and on a logarithmic axis zero, break the line in two."""
    assert [len(line) for line in points(chart(PANEL, 1, 2, math.nan, 3, 4))] == [2, 2]
    assert [len(line) for line in points(chart(PANEL, 1, 2, math.inf, 3, 4))] == [2, 2]
    assert [len(line) for line in points(chart(LOG, 1, 2, 0, 3, 4))] == [2, 2]


@pytest.mark.parametrize("panel", [PANEL, LOG])
@pytest.mark.parametrize("values", [(1.0,), (0.0, 0.0), (math.nan,), (math.inf, 0.0), (-1.0, -1.0)])
def test_degenerate_series_are_drawn(panel: Panel, values: tuple[float, ...]) -> None:
    """One value, equal values and no finite value give a chart with axes and finite numbers."""
    svg = chart(panel, *values)
    assert list(svg.iter("line"))
    numbers = [element.attrib.get(name) for element in svg.iter() for name in ("cx", "cy", "y1")]
    assert all(math.isfinite(float(text)) for text in numbers if text is not None)


def test_a_tooltip_names_step_and_value_and_labels_are_escaped() -> None:
    """What is inserted into the page unescaped has escaped its labels itself."""
    svg = chart(PANEL, 1234.5, label="<script>")
    assert [title.text for title in svg.iter("title")] == ["<script>, step 0: 1,234"]
    assert svg.attrib["aria-label"] == "A & <b>"
    assert "script" not in {element.tag for element in svg.iter()}


def test_a_long_series_is_thinned_and_keeps_its_ends() -> None:
    """100,000 steps make no page of megabytes; the first and the last step are drawn."""
    (line,) = points(chart(PANEL, *(float(step) for step in range(100_000))))
    assert len(line) == 1500
    assert (line[0][0], line[-1][0]) == (46.0, 346.0)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "3"),
        (1234567, "1,234,567"),
        (0.30000000004, "0.3"),
        (2e-5, "2e-05"),
        (1234.56, "1,235"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
    ],
)
def test_numbers_read_well(value: float, text: str) -> None:
    """Four digits, thousands separated, nothing lost in what is not finite."""
    assert number(value) == text


def test_panels_draw_metrics_of_the_list() -> None:
    """A panel cannot wait for a metric that nobody may write."""
    assert {line.metric for panel in PANELS for line in panel.lines} <= set(METRICS)
