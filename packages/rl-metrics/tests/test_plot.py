"""The picture."""

import math
import struct
import subprocess
import sys
from pathlib import Path

import matplotlib as mpl
import matplotlib.image
import numpy as np
import pytest
from matplotlib.colors import to_rgb

from rl_metrics import RunReport, StepRecord, plot_comparison, plot_run, staleness_histogram
from rl_metrics.figure import COLOURS, SHARE_COLOURS


@pytest.fixture
def records() -> list[StepRecord]:
    """A rising reward, held out at the ends, and a length."""
    return [
        StepRecord(
            step=step,
            unix_seconds=0.0,
            values={
                "reward/train/mean": step / 8,
                "length/completion/mean": 16.0 - step,
                **({"reward/heldout/mean": step / 10} if step in {0, 6} else {}),
            },
        )
        for step in range(7)
    ]


def pixels_of(path: Path, colour: str) -> int:
    """Pixels that have exactly this colour."""
    picture = matplotlib.image.imread(path)[:, :, :3]
    return int((np.abs(picture - np.array(to_rgb(colour))).max(axis=2) < 2 / 255).sum())


def test_both_rewards_are_drawn(records: list[StepRecord], tmp_path: Path) -> None:
    """A PNG with the first two line colours; without held-out rewards the second is missing."""
    both, alone = tmp_path / "both.png", tmp_path / "alone.png"
    plot_run(records, both, title="A run")
    assert both.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", both.read_bytes()[16:24])
    assert width > 1000
    assert height > 500
    assert min(pixels_of(both, colour) for colour in COLOURS[:2]) > 200
    plot_run(
        [
            StepRecord(step=step, unix_seconds=0.0, values={"reward/train/mean": step / 4})
            for step in range(4)
        ],
        alone,
    )
    assert pixels_of(alone, COLOURS[0]) > 200
    assert pixels_of(alone, COLOURS[1]) == 0
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["alone.png", "both.png"]


def test_unusual_values_are_drawn_around(tmp_path: Path) -> None:
    """NaN, infinity, and zeros on a logarithmic axis are neither errors nor warnings."""
    values = [0.0, math.nan, math.inf, 1e-3]
    records = [
        StepRecord(
            step=step,
            unix_seconds=0.0,
            values={"reward/train/mean": value, "mismatch/logprob/max": value},
        )
        for step, value in enumerate(values)
    ]
    plot_run(records, tmp_path / "a.png")
    plot_run(records[:1], tmp_path / "b.png")
    plot_run(records[1:3], tmp_path / "c.png")


def test_nothing_to_draw_is_an_error(tmp_path: Path) -> None:
    """An empty picture would say nothing."""
    with pytest.raises(ValueError, match="none of the 0 records holds a metric that is drawn"):
        plot_run([], tmp_path / "a.png")
    assert not list(tmp_path.iterdir())


def test_a_stacked_panel_is_drawn_in_its_own_colours(tmp_path: Path) -> None:
    """Half the trajectories fresh, half one step stale: the two fill the panel evenly."""
    values = staleness_histogram([0, 0, 1, 1])
    records = [StepRecord(step=step, unix_seconds=0.0, values=values) for step in range(1, 5)]
    plot_run(records, tmp_path / "a.png")
    fresh, stale = (pixels_of(tmp_path / "a.png", colour) for colour in SHARE_COLOURS[:2])
    assert fresh > 10_000
    assert 0.95 < fresh / stale < 1.05


def test_two_runs_are_overlaid(records: list[StepRecord], tmp_path: Path) -> None:
    """Each run has its colour in every panel; a metric that only the second has keeps it too."""
    first = RunReport(title="a", records=records[:1])
    second = RunReport(title="b", records=records)
    plot_comparison(first, second, tmp_path / "a.png")
    assert pixels_of(tmp_path / "a.png", COLOURS[1]) > 1000
    empty = RunReport(title="c", records=[])
    with pytest.raises(ValueError, match="neither c nor c holds a metric that is drawn"):
        plot_comparison(empty, empty, tmp_path / "b.png")


def test_pyplot_and_global_settings_are_left_alone(
    records: list[StepRecord], tmp_path: Path
) -> None:
    """Drawing neither loads pyplot nor changes a global setting."""
    before = dict(mpl.rcParams)
    plot_run(records, tmp_path / "a.png")
    assert dict(mpl.rcParams) == before
    program = (
        "import sys, pathlib;"
        "from rl_metrics import StepRecord, plot_run;"
        "assert 'matplotlib' not in sys.modules;"
        "record = StepRecord(step=1, unix_seconds=0.0, values={'reward/train/mean': 1.0});"
        "plot_run([record], pathlib.Path(sys.argv[1]));"
        "assert 'matplotlib' in sys.modules and 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "b.png")], check=True)


def test_without_matplotlib_the_extra_is_named(
    records: list[StepRecord], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message says what to install."""
    monkeypatch.delitem(sys.modules, "rl_metrics.figure", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"install the extra rl-metrics\[plot\]"):
        plot_run(records, tmp_path / "a.png")
