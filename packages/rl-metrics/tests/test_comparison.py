"""Two runs on one page."""

import re
from collections.abc import Mapping
from html import unescape
from pathlib import Path
from types import MappingProxyType

import pytest

from rl_metrics import CompletionPair, RunReport, StepRecord, staleness_histogram, write_comparison
from rl_metrics.comparison import comparison_panels

HOSTILE = "<script>alert(1)</script>{{ 7 * 7 }}\u202e"


def run(
    title: str,
    *rewards: float,
    config: str = "",
    answer: str = "4",
    more: Mapping[str, float] = MappingProxyType({}),
) -> RunReport:
    records = [
        StepRecord(step=step, unix_seconds=0.0, values={"reward/train/mean": reward, **more})
        for step, reward in enumerate(rewards, start=1)
    ]
    pair = CompletionPair(
        prompt="2 + 2?", ground_truth="4", before="", after=answer, reward_before=0, reward_after=1
    )
    return RunReport(
        title=title,
        records=records,
        config_toml=config,
        completions=[pair],
        environments={"sampler": {"NAME": title, "HF_TOKEN": title, "SAME": "1"}},
    )


def text_of(path: Path) -> str:
    html = path.read_text(encoding="utf-8")
    body = html[html.index("<main>") :]
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", body)).split())


def test_what_was_set_differently_comes_first(tmp_path: Path) -> None:
    """Only what differs, nested settings by their path, and what one run lacks."""
    path = tmp_path / "comparison.html"
    first = run("a", 0.5, config='seed = 1\nsame = 2\n[optim]\nlr = 1e-6\n[loss]\nkind = "grpo"\n')
    second = run("b", 0.5, config="seed = 1\nsame = 2\nnew = [1, 2]\n[optim]\nlr = 2e-6\n")
    write_comparison(first, second, path)
    text = text_of(path)
    assert "Setting a b optim.lr 1e-06 2e-06 loss.kind grpo (not set) new (not set) [1, 2]" in text
    assert text.index("Set differently") < text.index("In short") < text.index("Over the runs")
    assert "sampler: NAME a b" in text
    assert "HF_TOKEN" not in text  # both set, and both not shown
    assert "SAME" not in text


def test_equal_and_missing_settings_are_told_apart(tmp_path: Path) -> None:
    """Nothing differs is not the same as nothing is known."""
    path = tmp_path / "comparison.html"
    write_comparison(run("a", 0.5, config="x = 1"), run("b", 0.5, config="x = 1 # why"), path)
    assert "Nothing: both runs have the same effective configuration." in text_of(path)
    write_comparison(run("a", 0.5), run("b", 0.5), path)
    assert "Unknown: neither run folder holds effective_config.toml." in text_of(path)


def test_numbers_stand_side_by_side(tmp_path: Path) -> None:
    """Last values, means over the run, and the second's mean over the first's."""
    path = tmp_path / "comparison.html"
    first = run("a", 0.25, 0.5, more={"time/step/seconds": 10.0})
    second = run("b", 0.5, 0.75, 1.0, answer="five", more={"entropy/policy/mean": 2.0})
    write_comparison(first, second, path)
    text = text_of(path)
    assert "reward/train/mean reward 0.5 1 0.375 0.75 2" in text
    assert "time/step/seconds s 10 10" in text
    assert "entropy/policy/mean nats 2 2" in text
    assert "Sampled reward 0.25 \u2192 0.50 0.50 \u2192 1.00 first to last" in text
    assert "2 + 2? 4 4 reward 1 five reward 1" in text


def test_every_metric_is_overlaid_and_keeps_the_runs_colours() -> None:
    """The second run's line is the second one, even where the first run has none."""
    first = run("a", 0.25, 0.5, more=staleness_histogram([0]))
    second = run("b", 0.5, more={"entropy/policy/mean": 2.0, "time/publish/seconds": 1.0})
    panels = {panel.title: series for panel, series in comparison_panels(first, second)}
    assert list(panels) == [
        "Reward: sampled",
        "Entropy",
        "Staleness shares: a",
        "Wall time: publish",
    ]
    assert [(line.label, line.values) for line in panels["Reward: sampled"]] == [
        ("a", (0.25, 0.5)),
        ("b", (0.5,)),
    ]
    assert [(line.label, line.values) for line in panels["Entropy"]] == [
        ("a (not recorded)", ()),
        ("b", (2.0,)),
    ]


def test_everything_from_outside_is_escaped(tmp_path: Path) -> None:
    """Titles, settings, answers and variables of both runs are text."""
    path = tmp_path / "comparison.html"
    config = f'x = "{HOSTILE}"'.replace("\u202e", "\\u202e")
    first = run(f"a{HOSTILE}", 0.5, config=config, answer=HOSTILE)
    second = run(f"b{HOSTILE}", 0.5, answer=HOSTILE)
    write_comparison(first, second, path)
    html = path.read_text(encoding="utf-8")
    assert "<script" not in html
    assert "&lt;script&gt;" in html
    assert not re.search(r"https?:|@import|url\(|\bsrc=|\bhref=", html)
    assert "49" not in text_of(path)


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    """No step, one title for both, or a configuration that is no TOML."""
    path = tmp_path / "comparison.html"
    with pytest.raises(ValueError, match="expected at least one step of 'b', got none"):
        write_comparison(run("a", 0.5), run("b"), path)
    with pytest.raises(ValueError, match="titles that tell the runs apart, got twice 'a'"):
        write_comparison(run("a", 0.5), run("a", 0.5), path)
    with pytest.raises(ValueError, match=r"effective_config\.toml of b: expected TOML: "):
        write_comparison(run("a", 0.5), run("b", 0.5, config="x = "), path)
    assert not list(tmp_path.iterdir())
