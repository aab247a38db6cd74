"""A reference policy, and device memory that is given away and taken back."""

from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from engine_fsdp import FsdpConfig, FsdpEngine, FsdpScorer, OptimConfig
from parallel_state.parking import Parked
from rl_contracts.packing import pack
from rl_contracts.rollout import PolicyVersion, Trajectory
from rl_contracts.train import LossOutput, PackedBatch

SaveModel = Callable[..., Path]

CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("process_group")


def _config(folder: Path) -> FsdpConfig:
    return FsdpConfig(model_path=str(folder), optim=OptimConfig(learning_rate=0.01))


def _batches() -> list[PackedBatch]:
    rows = [
        Trajectory(
            trajectory_id=str(index),
            group_id="group",
            token_ids=(3, 5, 7, 11, index),
            loss_mask=(False, False, True, True, True),
            rollout_logprobs=(0.0,) * 5,
            oldest_version=PolicyVersion(0),
            newest_version=PolicyVersion(0),
        )
        for index in range(3)
    ]
    return pack(rows, [1.0, -1.0, 2.0], max_tokens=10)[0]


def _loss(policy_logprobs: Float[Tensor, " tokens"], batch: PackedBatch) -> LossOutput:
    per_token = batch.advantages.repeat_interleave(batch.cu_seqlens.diff())
    return LossOutput(loss=-(policy_logprobs * per_token).sum() / 9, metrics={})


def test_reference_logprobs_are_those_of_the_first_policy(save_model: SaveModel) -> None:
    """After training they are still what the policy said at version 0, bit for bit, and the
    policy's are not.
    """
    config = _config(save_model())
    engine, reference = FsdpEngine(config, device=CPU), FsdpScorer(config, device=CPU)
    first = engine.logprobs(_batches())
    for _ in range(2):
        engine.forward_backward(_batches(), _loss)
        engine.optim_step()
    scored = reference.logprobs(_batches())
    assert all(torch.equal(left, right) for left, right in zip(first, scored, strict=True))
    trained = engine.logprobs(_batches())
    assert not any(torch.equal(left, right) for left, right in zip(trained, scored, strict=True))
    assert not any(logprobs.requires_grad for logprobs in scored)


def test_a_scorer_of_another_folder(save_model: SaveModel, tmp_path: Path) -> None:
    """The weights that a trained engine saved score as the engine does (in float32)."""
    config = attrs.evolve(_config(save_model()), compute_dtype="float32")
    engine = FsdpEngine(config, device=CPU)
    engine.forward_backward(_batches(), _loss)
    engine.optim_step()
    engine.save_pretrained(tmp_path / "trained")
    elsewhere = attrs.evolve(config, model_path=str(tmp_path / "trained"))
    scored = FsdpScorer(elsewhere, device=CPU).logprobs(_batches())
    for left, right in zip(engine.logprobs(_batches()), scored, strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("kind", [FsdpEngine, FsdpScorer])
def test_there_is_nothing_to_move_on_a_cpu(
    save_model: SaveModel, kind: type[FsdpEngine | FsdpScorer]
) -> None:
    """Both calls are refused by name, and nothing has moved."""
    built = kind(_config(save_model()), device=CPU)
    with pytest.raises(
        ValueError, match=rf"^{kind.__name__}.to_host: .* in any case, since the device is cpu"
    ):
        built.to_host()
    with pytest.raises(RuntimeError, match=rf"^{kind.__name__}.to_device: the weights are on the"):
        built.to_device()
    built.logprobs(_batches())


def test_memory_goes_and_comes_back_under_the_views_of_it() -> None:
    """Two views of one storage and a tensor of its own: freed, then the same bits in both views."""
    flat = torch.arange(6.0)
    view, other = flat.view(2, 3), torch.arange(4, dtype=torch.bfloat16)
    parked = Parked([flat, view, other])
    assert parked.nbytes == 6 * 4 + 4 * 2
    assert flat.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0
    parked.restore()
    assert view.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert other.tolist() == [0.0, 1.0, 2.0, 3.0]
    flat[0] = 7.0
    assert view[0, 0] == 7.0
