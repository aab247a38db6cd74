"""A loss function that raises."""

from collections.abc import Iterator
from dataclasses import fields, replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engine_veomni.loss_agreement import AgreedLoss, for_loss
from parallel_state.process_group import init_process_group
from rl_contracts.packed_images import PackedImages
from rl_contracts.rollout import PolicyVersion
from rl_contracts.train import LossOutput, PackedBatch


def batch(name: str) -> PackedBatch:
    """One sequence of three tokens."""
    return PackedBatch(
        token_ids=torch.tensor([1, 2, 3]),
        positions=torch.arange(3),
        cu_seqlens=torch.tensor([0, 3], dtype=torch.int32),
        loss_mask=torch.tensor([False, True, True]),
        advantages=torch.ones(1),
        rollout_logprobs=torch.zeros(3),
        trajectory_ids=(name,),
    )


@pytest.fixture
def one_rank() -> Iterator[None]:
    init_process_group()
    yield
    dist.destroy_process_group()


def test_a_loss_gets_no_inputs_of_the_model_alone() -> None:
    """Patches and routes are large; all else is the same tensor, in another batch too."""
    images = PackedImages(
        patches=torch.zeros(4, 6),
        grids=torch.tensor([[1, 2, 2]]),
        image_of_place=torch.tensor([0]),
        first_tokens=torch.tensor([0]),
        num_tokens=torch.tensor([1]),
    )
    routes = torch.zeros(3, 1, 2, dtype=torch.int16)
    plain = batch("a")
    found = for_loss(replace(plain, images=images, routed_experts=routes))
    assert found.images is None
    assert found.routed_experts is None
    for each in fields(plain):
        assert getattr(found, each.name) is getattr(plain, each.name), each.name


@pytest.mark.usefixtures("one_rank")
def test_its_own_error_comes_back_after_the_last_micro_batch() -> None:
    """The micro-batches after it get a loss of 0 with a graph, and it is not asked again."""
    asked: list[tuple[str, ...]] = []

    def failing(policy_logprobs: Tensor, given: PackedBatch) -> LossOutput:
        asked.append(given.trajectory_ids)
        if "bad" in given.trajectory_ids:
            raise KeyError("no reward")
        return LossOutput(loss=policy_logprobs.sum(), metrics={})

    agreed = AgreedLoss(failing)
    for name, wanted in (("first", -3.0), ("bad", 0.0), ("last", 0.0)):
        loss = agreed(torch.full((3,), -1.0, requires_grad=True), batch(name))
        assert loss.requires_grad
        assert loss.item() == wanted
    assert asked == [("first",), ("bad",)]
    with pytest.raises(KeyError, match="no reward"):
        agreed.sum_over_ranks(policy_version=PolicyVersion(0))


@pytest.mark.usefixtures("one_rank")
def test_what_is_no_loss_output_is_an_error_of_the_loss_function() -> None:
    """A function that returns a tensor fails as one that raises."""
    agreed: AgreedLoss[PackedBatch] = AgreedLoss(
        lambda policy_logprobs, _: policy_logprobs.sum()  # type: ignore[arg-type,return-value]
    )
    agreed(torch.zeros(3, requires_grad=True), batch("only"))
    with pytest.raises(AttributeError, match="metrics"):
        agreed.sum_over_ranks(policy_version=PolicyVersion(0))
