"""The report."""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rl_metrics import (
    METRICS,
    CompletionPair,
    MetricsWriter,
    RunReport,
    StepRecord,
    read_run,
    write_completions,
    write_report,
)
from rl_metrics.panels import PANELS

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>{{ 7 * 7 }}\u202e\x1b[31m"


@pytest.fixture
def records() -> list[StepRecord]:
    """Step 0 holds the first held-out reward, steps 1 to 6 a rising reward."""
    first = StepRecord(step=0, unix_seconds=1.0, values={"reward/heldout/mean": 0.125})
    return [first] + [
        StepRecord(
            step=step,
            unix_seconds=1.0 + step,
            values={
                "reward/train/mean": step / 8,
                "length/completion/mean": 16.0 - step,
                "mismatch/logprob/max": 4e-5 * step,
                "time/step/seconds": 2.5,
                "time/elapsed/seconds": 20.0 + 2.5 * step,
                **({"reward/heldout/mean": 0.75} if step == 6 else {}),
            },
        )
        for step in range(1, 7)
    ]


class Page(HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


def test_everything_from_outside_is_escaped(records: list[StepRecord], tmp_path: Path) -> None:
    """A script in a completion, config, title or environment is text on the page."""
    path = tmp_path / "report.html"
    pair = CompletionPair(
        prompt=HOSTILE,
        ground_truth=HOSTILE,
        before=HOSTILE,
        after=HOSTILE,
        reward_before=0.0,
        reward_after=None,
    )
    report = RunReport(
        title=HOSTILE,
        subtitle=HOSTILE,
        records=records,
        completions=[pair],
        config_toml=HOSTILE,
        environments={HOSTILE: {HOSTILE: HOSTILE}},
    )
    write_report(report, path)
    page = Page(path)
    assert "script" not in page.tags
    assert "img" not in page.tags
    assert not any(name.startswith("on") for name, _ in page.attributes)
    assert page.text.count("<script>alert(1)</script>") == 11
    assert page.text.count("{{ 7 * 7 }}<U+202E>\u241b[31m") == 5
    assert "49" not in page.text.replace("0.49", "")


def test_the_page_needs_nothing_else(records: list[StepRecord], tmp_path: Path) -> None:
    """No address, no script, no import; the page's own policy forbids them."""
    path = tmp_path / "report.html"
    write_report(RunReport(title="A run", records=records), path)
    page = Page(path)
    assert not {"script", "link", "iframe", "img", "object"} & set(page.tags)
    names = {name for name, _ in page.attributes}
    assert not {"src", "href", "srcset", "action"} & names
    html = path.read_text(encoding="utf-8")
    assert not re.search(r"https?:|@import|url\(", html)
    assert "default-src 'none'" in html
    assert "prefers-color-scheme: dark" in html


def test_headlines_and_tables_hold_the_runs_numbers(
    records: list[StepRecord], tmp_path: Path
) -> None:
    """First and last reward, steps, seconds, lowest and highest of every metric."""
    path = tmp_path / "report.html"
    write_report(RunReport(title="A run", records=records), path)
    text = " ".join(Page(path).text.split())
    for expected in (
        "Held-out reward 0.12 \u2192 0.75",
        "Sampled reward 0.12 \u2192 0.75",
        "Completion length 15.0 \u2192 10.0",
        "Steps 6 2.5 s each",
        "Wall time 35 s",
        "Sampler mismatch 0.00024",
        "reward/train/mean reward 0.125 0.75 0.125 0.75 Mean reward",
    ):
        if expected.startswith("reward/"):
            expected = expected.replace("mean reward ", "mean")  # noqa: PLW2901 - cells touch
            assert "reward/train/meanreward0.1250.750.1250.75Mean reward" in text
        else:
            assert expected in text
    assert Page(path).tags.count("figure") == 4
    assert Page(path).tags.count("svg") == 5  # the first one for wide and for narrow pages


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e308])
def test_a_run_that_blew_up_has_a_report(value: float, tmp_path: Path) -> None:
    """Whatever the last step measured, the page says so and shows the steps before."""
    path = tmp_path / "report.html"
    steps = [dict.fromkeys(METRICS, 1.0), dict.fromkeys(METRICS, value)]
    records = [
        StepRecord(step=step, unix_seconds=0.0, values=values) for step, values in enumerate(steps)
    ]
    write_report(RunReport(title="A run", records=records), path)
    expected = {math.nan: "nan", math.inf: "inf", -math.inf: "-inf"}.get(value)
    if expected is not None:
        assert f"Held-out reward 1.00 \u2192 {expected}" in " ".join(Page(path).text.split())


def test_panels_without_numbers_are_named(records: list[StepRecord], tmp_path: Path) -> None:
    """A reader who looks for the entropy is told that the run did not record it."""
    path = tmp_path / "report.html"
    write_report(RunReport(title="A run", records=records), path)
    text = Page(path).text
    assert "Not recorded in this run: Ended by the model, Groups without spread, Grad" in text
    everything = StepRecord(step=1, unix_seconds=0.0, values=dict.fromkeys(METRICS, 0.5))
    write_report(RunReport(title="A run", records=[everything]), path)
    page = Page(path)
    assert "Not recorded" not in page.text
    assert page.tags.count("figure") == len(PANELS)
    assert all(panel.title in page.text for panel in PANELS)


def test_sections_without_content_are_left_out(records: list[StepRecord], tmp_path: Path) -> None:
    """No empty heading promises what is not there."""
    path = tmp_path / "report.html"
    write_report(RunReport(title="A run", records=records), path)
    text = Page(path).text
    for heading in ("Answers before and after", "Effective configuration", "Environment"):
        assert heading not in text


def test_secrets_are_not_shown(records: list[StepRecord], tmp_path: Path) -> None:
    """A variable that is named like a secret keeps its value; one that only sounds so is shown."""
    path = tmp_path / "report.html"
    environment = {
        "HF_TOKEN": "hf_abcdef",
        "OPENAI_API_KEY": "sk-abcdef",
        "EMPTY_PASSWORD": "",
        "TOKENIZERS_PARALLELISM": "false-abcdef",
        "HTTPS_PROXY": "http://me:p@ssword@proxy:3128/?a@b",
    }
    write_report(
        RunReport(title="A run", records=records, environments={"driver": environment}), path
    )
    text = Page(path).text
    assert "hf_abcdef" not in text
    assert "sk-abcdef" not in text
    assert text.count("(set, not shown)") == 2
    assert text.count("(empty)") == 1
    assert "false-abcdef" in text
    assert "http://(not shown)@proxy:3128/?a@b" in text


def test_a_run_folder_becomes_a_report(tmp_path: Path) -> None:
    """Metrics are needed; config, completions and environments are taken where they exist."""
    with pytest.raises(FileNotFoundError, match=r"no run folder: expected a file metrics\.jsonl"):
        read_run(tmp_path, title="A run")
    with MetricsWriter.create(tmp_path / "metrics.jsonl") as writer:
        record = writer.write(1, {"reward/train/mean": 0.5})
    assert read_run(tmp_path, title="A run") == RunReport(title="A run", records=[record])

    (tmp_path / "effective_config.toml").write_text("seed = 1\n")
    (tmp_path / "environments.json").write_text(json.dumps({"driver": {"A": "1"}}))
    pair = CompletionPair(
        prompt="?", ground_truth="1", before="a", after="b", reward_before=0, reward_after=1
    )
    write_completions([pair], tmp_path / "completions.json")
    assert read_run(tmp_path, title="A run", subtitle="GRPO") == RunReport(
        title="A run",
        subtitle="GRPO",
        records=[record],
        completions=[pair],
        config_toml="seed = 1\n",
        environments={"driver": {"A": "1"}},
    )


@pytest.mark.parametrize("content", ["{", "[]", '{"a": 1}', '{"a": {"b": 1}}'])
def test_broken_environments_are_named(content: str, tmp_path: Path) -> None:
    """The file's name stands in the message."""
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "environments.json").write_text(content)
    with pytest.raises(ValueError, match=r"environments\.json: expected a JSON object"):
        read_run(tmp_path, title="A run")


def test_a_report_on_nothing_is_refused(tmp_path: Path) -> None:
    """There is no page without a step."""
    with pytest.raises(ValueError, match="expected at least one step to report on"):
        write_report(RunReport(title="A run", records=[]), tmp_path / "report.html")
    assert not list(tmp_path.iterdir())
