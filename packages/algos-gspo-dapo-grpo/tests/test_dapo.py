"""DAPO's settings as one value."""

import torch

from algos_gspo_dapo_grpo import (
    DapoConfig,
    DapoLoss,
    GrpoAdvantages,
    SoftOverlong,
    TokenMean,
    dapo_token_losses,
)


def test_one_call_assembles_the_papers_settings() -> None:
    """Clip 0.2 / 0.28, token mean, no KL, group std, limit 20480 with a buffer of 4096."""
    config = DapoConfig()
    assert (config.loss.clip_low, config.loss.clip_high) == (0.2, 0.28)
    assert config.loss.aggregation == TokenMean()
    assert not hasattr(config.loss, "kl")
    assert config.loss.rollout_correction is None
    assert config.advantages == GrpoAdvantages()
    assert config.overlong == SoftOverlong(max_length=20_480, buffer=4_096, factor=1.0)
    assert config.dynamic_sampling is not None


def test_the_upper_clip_is_higher_than_the_lower() -> None:
    """With A = 1 a ratio of 1.25 is still free, and at 1.5 the loss stays at -1.28."""
    log_ratios = torch.log(torch.tensor([1.25, 1.5]))
    surrogate = dapo_token_losses(
        log_ratios,
        torch.zeros(2),
        torch.ones(2),
        torch.ones(2, dtype=torch.bool),
        config=DapoLoss(),
    )
    torch.testing.assert_close(surrogate.losses, torch.tensor([-1.25, -1.28]))
    assert surrogate.clipped.tolist() == [False, True]
