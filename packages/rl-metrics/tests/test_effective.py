"""effective_config.toml as a flat table."""

import pytest

from rl_metrics.effective import flat_settings


def test_every_leaf_has_its_path() -> None:
    """Tables by name, entries of a list of tables by number, other lists and dates as text."""
    toml = """
        seed = 1
        betas = [0.9, 0.999]
        [loss]
        kind = "grpo"
        kl.enabled = false
        [[trackers]]
        kind = "tensorboard"
        [[trackers]]
        kind = "wandb"
        since = 2026-01-02
    """
    assert flat_settings(toml, where="a.toml") == {
        "seed": 1,
        "betas": "[0.9, 0.999]",
        "loss.kind": "grpo",
        "loss.kl.enabled": False,
        "trackers.0.kind": "tensorboard",
        "trackers.1.kind": "wandb",
        "trackers.1.since": "2026-01-02",
    }
    assert flat_settings("", where="a.toml") == {}


def test_a_broken_file_is_named() -> None:
    """With what the parser says."""
    with pytest.raises(ValueError, match=r"a\.toml: expected TOML: Invalid value"):
        flat_settings("seed = ", where="a.toml")
