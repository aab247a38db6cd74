"""Panels as they stand on a page."""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from rl_metrics.panels import Panel, Series
from rl_metrics.svg import line_chart
from rl_metrics.svg_bars import stacked_chart

_WIDE = (1060.0, 250.0)
_NARROW = (360.0, 190.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """A drawn panel."""

    panel: Panel
    series: Sequence[Series]
    svg: Markup

    wide_svg: Markup | None = None
    """The same for the whole width of a wide page; a narrow one shows `svg`."""

    @property
    def colours(self) -> str:
        """Which set of the page's colours its series have."""
        return "b" if self.panel.stacked else "s"


def draw_charts(panels: Sequence[tuple[Panel, Sequence[Series]]]) -> list[Chart]:
    """Draw panels in order, the first across the whole page."""
    return [
        Chart(
            panel=panel,
            series=series,
            svg=_draw(panel, series, _NARROW),
            wide_svg=_draw(panel, series, _WIDE) if index == 0 else None,
        )
        for index, (panel, series) in enumerate(panels)
    ]


def _draw(panel: Panel, series: Sequence[Series], size: tuple[float, float]) -> Markup:
    draw = stacked_chart if panel.stacked else line_chart
    return Markup(draw(panel, series, width=size[0], height=size[1]))  # noqa: S704 - they escape
