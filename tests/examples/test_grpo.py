"""The loop's own arithmetic: the rows that are trained on, the seeds, the ratio."""

import dataclasses
import sys
from pathlib import Path

import attrs
import pytest
import torch

from algos_gspo_dapo_grpo import BatchCounts, GrpoLoss, SoftOverlong
from async_policy import Batch, Ticket
from rl_contracts import Completion, PolicyVersion
from rl_contracts.train import PackedBatch
from rl_tasks import ChatMessage, EncodedProblem, Problem

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from grpo import Group, LoopConfig, loss_of, rows_of, sampling_seed
from identity import model_digest

NAN = float("nan")
CONFIG = LoopConfig(num_steps=1, max_new_tokens=2, group_size=3)


def group(index: int, *rewards: float) -> Group:
    problem = Problem(
        problem_id=f"p{index}",
        messages=(ChatMessage(role="user", content="?"),),
        ground_truth="1",
        data_source="test",
    )
    completion = Completion(
        token_ids=(7, 8),
        rollout_logprobs=(-1.0, -1.0),
        policy_versions=(PolicyVersion(0),) * 2,
        finish_reason="stop",
    )
    return Group(
        problem=EncodedProblem(problem=problem, prompt_ids=(1, 2)),
        completions=(completion,) * len(rewards),
        texts=("",) * len(rewards),
        rewards=rewards,
        group_id=f"group-{index}",
    )


def batch_of(*groups: Group) -> Batch[Group]:
    ticket = Ticket(index=0, step=PolicyVersion(0), admitted_version=PolicyVersion(0), attempt=0)
    return Batch(
        version=PolicyVersion(0),
        tickets=(ticket,) * len(groups),
        groups=groups,
        staleness=(0,) * len(groups),
        waited_s=0.0,
    )


@pytest.mark.parametrize(
    ("rewards", "kept", "uniform"),
    [
        ((0.0, 0.5, 1.0), 3, 0.0),  # the middle one has advantage 0 and counts all the same
        ((1.0, NAN, 0.0), 2, 0.0),
        ((1.0, 1.0, 1.0), 1, 1.0),  # one row stands for a step without gradient
        ((1.0, NAN, 1.0), 1, 1.0),
        ((NAN, NAN, NAN), 1, 1.0),
    ],
)
def test_whole_groups_with_spread_are_trained_on(
    rewards: tuple[float, ...], kept: int, uniform: float
) -> None:
    """All scored rows of a group with spread count, whatever their advantage (A01, A06)."""
    rows = rows_of(batch_of(group(0, *rewards)), CONFIG)
    assert len(rows.trajectories) == len(rows.advantages) == kept
    assert rows.metrics["groups/uniform/fraction"] == uniform
    assert abs(sum(rows.advantages)) < 1e-6
    if uniform == 1.0:
        assert rows.advantages == [0.0]


def test_rows_keep_their_own_advantages() -> None:
    """Trajectory ids and advantages stay together when a group is left out."""
    rows = rows_of(batch_of(group(0, 1.0, 1.0, 1.0), group(1, 0.0, 0.0, 1.0)), CONFIG)
    assert [row.trajectory_id for row in rows.trajectories] == [
        "group-1/0",
        "group-1/1",
        "group-1/2",
    ]
    # mean 1/3, sample std sqrt(1/3): -0.57735, -0.57735, 1.1547
    assert rows.advantages == pytest.approx([-0.57735, -0.57735, 1.1547], abs=1e-4)
    assert rows.metrics["reward/train/mean"] == pytest.approx(4 / 6)
    assert rows.counts == BatchCounts(num_tokens=6, num_sequences=3)


def test_long_completions_are_punished_before_advantages() -> None:
    """The soft punishment joins the rewards that advantages are made of, not the one shown (A19).

    Completions of two tokens with a limit of 2 and a buffer of 1 lose a whole point, the one of
    one token nothing: rewards 1, 0, 0 become 1, -1, -1 and the advantages those of (1, -1, -1).
    """
    short = dataclasses.replace(
        group(0, 0.0).completions[0],
        token_ids=(7,),
        rollout_logprobs=(-1.0,),
        policy_versions=(PolicyVersion(0),),
    )
    given = group(0, 1.0, 0.0, 0.0)
    given = dataclasses.replace(given, completions=(short, *given.completions[1:]))
    config = attrs.evolve(CONFIG, overlong=SoftOverlong(max_length=2, buffer=1))
    rows = rows_of(batch_of(given), config)
    # mean -1/3, sample std sqrt(4/3): 1.1547, -0.57735, -0.57735
    assert rows.advantages == pytest.approx([1.1547, -0.57735, -0.57735], abs=1e-4)
    assert rows.metrics["reward/train/mean"] == pytest.approx(1 / 3)
    with pytest.raises(ValueError, match=r"max_length = 3 and loop\.max_new_tokens = 2"):
        attrs.evolve(CONFIG, overlong=SoftOverlong(max_length=3, buffer=1))


def test_no_two_samples_share_a_seed() -> None:
    """Seeds of groups are far apart, for training and evaluation, and do not move (A44)."""
    seeds = [sampling_seed("train", 0, str(index)) for index in range(512)]
    seeds += [sampling_seed("heldout", 0, f"p{index}") for index in range(64)]
    seeds += [sampling_seed("train", 1, str(index)) for index in range(512)]
    of_samples = {seed + member for seed in seeds for member in range(8)}
    assert len(of_samples) == 8 * len(seeds)
    assert all(0 <= seed < 2**62 for seed in seeds)
    assert sampling_seed("train", 0, "0") == seeds[0]


def test_a_missing_rollout_logprob_has_ratio_one() -> None:
    """A token without a sampler's logprob is neutral: finite loss, gradient -A / tokens (A25)."""
    batch = PackedBatch(
        token_ids=torch.tensor([1, 7, 8]),
        positions=torch.arange(3),
        cu_seqlens=torch.tensor([0, 3], dtype=torch.int32),
        loss_mask=torch.tensor([False, True, True]),
        advantages=torch.tensor([1.0]),
        rollout_logprobs=torch.tensor([0.0, -1.0, NAN]),
        trajectory_ids=("t",),
    )
    policy_logprobs = torch.tensor([0.0, -1.0, -2.0], requires_grad=True)
    output = loss_of(
        policy_logprobs,
        batch,
        config=GrpoLoss(),
        counts=BatchCounts(num_tokens=2, num_sequences=1),
    )
    torch.autograd.backward(output.loss)
    assert output.loss.item() == pytest.approx(-1.0)
    assert policy_logprobs.grad is not None
    assert policy_logprobs.grad.tolist() == pytest.approx([0.0, -0.5, -0.5])
    assert output.metrics["mismatch/gap/fraction"].item() == 0.5


def test_other_weights_of_the_same_shapes_are_another_model(tmp_path: Path) -> None:
    """A fine-tune of the model that a run began with is not that model, wherever it differs."""
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    content = bytearray(5 * 2**20)
    digests = set()
    for place in (0, 5 * 2**19, 5 * 2**20 - 1):
        changed = bytearray(content)
        changed[place] = 1
        weights.write_bytes(changed)
        digests.add(model_digest(tmp_path))
    weights.write_bytes(content)
    digests.add(model_digest(tmp_path))
    assert len(digests) == 4
    assert model_digest(tmp_path) in digests
