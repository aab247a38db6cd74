"""Every label that is known of four launches of verl is found."""

import fnmatch
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))

from verl_conversion.conversion import Conversion, convert
from verl_conversion.environment import judge_environment
from verl_conversion.launches import Launch, read_launches
from verl_conversion.releases import Release

HERE = Path(__file__).resolve().parent
EXPECTED: dict[str, dict[str, Any]] = tomllib.loads((HERE / "labels.toml").read_text("utf-8"))
RELEASES: tuple[Release, ...] = ("0.9.0", "0.9.1")
"""The releases before and after the commit that the labels were found at."""


def launch(name: str) -> Launch:
    (found,) = read_launches(HERE / "launches" / f"{name}.json")
    return found


def key_of(override: str) -> str:
    return override.partition("=")[0].lstrip("+")


def wrong(conversion: Conversion, expected: dict[str, list[str]]) -> list[str]:
    """Overrides that lack a label, and expectations that are about none."""
    found: list[str] = []
    for pattern, labels in expected.items():
        about = [
            line
            for line in conversion.lines
            if fnmatch.fnmatchcase(key_of(line.override), pattern) and line.labels != ("duplicate",)
        ]
        if not about:
            found.append(f"{pattern}: no override")
        found += [
            f"{line.override}: {line.labels}"
            for line in about
            if not set(labels) <= set(line.labels)
        ]
    return found


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("name", EXPECTED)
def test_every_known_label_is_found(name: str, release: Release) -> None:
    conversion = convert(launch(name), release)
    assert wrong(conversion, EXPECTED[name]["overrides"]) == []
    assert len(conversion.lines) == len(launch(name).overrides)
    assert not [line.override for line in conversion.lines if not line.labels]


@pytest.mark.parametrize("name", EXPECTED)
def test_no_override_of_these_is_unknown(name: str) -> None:
    conversion = convert(launch(name), "0.9.1")
    assert [line.override for line in conversion.lines if "unknown" in line.labels] == []


@pytest.mark.parametrize("name", [name for name in EXPECTED if "environment" in EXPECTED[name]])
def test_variables_go_through_device_env(name: str) -> None:
    found = launch(name)
    lines = judge_environment(
        found, convert(found, "0.9.1").composed, versions={"vllm-ascend": "0.23.0"}
    )
    labels = {line.variable.partition("=")[0]: set(line.labels) for line in lines}
    for variable, expected in EXPECTED[name]["environment"].items():
        assert set(expected) <= labels[variable], variable


@pytest.mark.parametrize("name", ["veomni_gpu", "veomni_npu"])
def test_of_two_equal_overrides_the_first_is_the_duplicate(name: str) -> None:
    conversion = convert(launch(name), "0.9.1")
    key = EXPECTED[name]["duplicate"]
    first, last = (line for line in conversion.lines if key_of(line.override) == key)
    assert first.labels == ("duplicate",)
    assert "the same value" in first.why[0]
    assert "duplicate" not in last.labels


@pytest.mark.parametrize("release", RELEASES)
def test_nineteen_overrides_equal_the_defaults(release: Release) -> None:
    """Hydra 1.3.8 composes the same with and without them; `model_engine` is not counted."""
    conversion = convert(launch("veomni_gpu"), release)
    assert sum("default" in line.labels for line in conversion.lines) == 19


def test_the_schedule_that_nobody_set_is_a_trap() -> None:
    conversion = convert(launch("veomni_gpu"), "0.9.1")
    (line,) = (line for line in conversion.unset if "lr_scheduler_type" in line.override)
    assert line.labels == ("trap",)
    assert line.decide
    assert conversion.settings["engine.optim.schedule"].value == "cosine"


def test_labels_name_their_evidence() -> None:
    """verl#7540 and its relatives stand beside the line that they are about."""
    conversion = convert(launch("dapo7b"), "0.9.1")
    (line,) = (
        line for line in conversion.lines if line.override.endswith("fsdp_config.strategy=fsdp2")
    )
    assert any("verl#7540" in text for text in line.evidence)
    assert all(
        line.evidence or "duplicate" in line.labels
        for line in conversion.lines
        if {"inert", "overwritten", "stale", "trap", "renamed"} & set(line.labels)
    )


def test_the_same_override_breaks_an_older_release() -> None:
    """Hydra 1.3.8 refuses it: 0.7.1 still had the switch, and + adds only what is not there."""
    conversion = convert(launch("veomni_gpu"), "0.7.1")
    (line,) = (line for line in conversion.lines if "use_legacy" in line.override)
    assert line.labels == ("broken",)
    assert "+ adds only what is not there yet" in line.why[0]


def test_a_reader_that_an_older_release_had_counts_there() -> None:
    """0.7.1 clipped by `actor.grad_clip`, the later ones by `actor.optim.clip_grad`."""
    (older,) = (
        line
        for line in convert(_clipped(), "0.7.1").lines
        if line.override.endswith("grad_clip=0.5")
    )
    assert older.labels == ("carried",)
    assert older.to[0].path == "engine.optim.max_grad_norm"
    assert convert(_clipped(), "0.9.1").settings["engine.optim.max_grad_norm"].value == 1.0


def _clipped() -> Launch:
    (found,) = read_launches(HERE / "launches" / "clipped.json")
    return found
