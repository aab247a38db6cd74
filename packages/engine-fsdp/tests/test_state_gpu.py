"""State on a GPU: given away and taken back, saved and loaded, and the same in two runs."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from engine_fsdp import FsdpConfig, FsdpEngine, FsdpScorer, OptimConfig
from parallel_state.process_group import init_process_group
from rl_contracts.packing import pack
from rl_contracts.rollout import PolicyVersion, Trajectory
from rl_contracts.train import LossOutput, PackedBatch

SaveModel = Callable[..., Path]

DEVICE = torch.device("cuda", 0)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
    pytest.mark.filterwarnings("ignore"),  # NCCL has warnings of its own
]


@pytest.fixture(autouse=True)
def process_group() -> Iterator[None]:
    """A process group that serves both devices."""
    init_process_group(backend="cpu:gloo,cuda:nccl")
    yield
    dist.destroy_process_group()
    torch.use_deterministic_algorithms(False)


def _config(folder: Path, **changes: Any) -> FsdpConfig:  # noqa: ANN401
    optim = OptimConfig(learning_rate=0.01)
    return FsdpConfig(model_path=str(folder), optim=optim, **changes)


def _batches() -> list[PackedBatch]:
    rows = [
        Trajectory(
            trajectory_id=str(index),
            group_id="group",
            token_ids=tuple((11 * index + 7 * place) % 37 for place in range(40 + index)),
            loss_mask=tuple(place > 1 for place in range(40 + index)),
            rollout_logprobs=(0.0,) * (40 + index),
            oldest_version=PolicyVersion(0),
            newest_version=PolicyVersion(0),
        )
        for index in range(6)
    ]
    return pack(rows, [1.0, -1.0, 2.0, 0.5, 1.5, -3.0], max_tokens=130)[0]


def _loss(policy_logprobs: Float[Tensor, " tokens"], batch: PackedBatch) -> LossOutput:
    per_token = batch.advantages.repeat_interleave(batch.cu_seqlens.diff())
    return LossOutput(loss=-(policy_logprobs * per_token).sum() / 240, metrics={})


def _train(engine: FsdpEngine, steps: int) -> None:
    for _ in range(steps):
        engine.forward_backward(_batches(), _loss)
        engine.optim_step()


def _differing(left: FsdpEngine, right: FsdpEngine) -> list[str]:
    ours, theirs = (
        left._state.tensors(left.policy_version),
        right._state.tensors(right.policy_version),
    )
    assert ours.keys() == theirs.keys()
    return [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])]


def test_an_engine_that_slept_goes_on_as_if_it_had_not(save_model: SaveModel) -> None:
    """Weights and moments leave the GPU and come back with the same bits. While they are away,
    everything that needs them is refused.
    """
    awake, slept = (FsdpEngine(_config(save_model()), device=DEVICE) for _ in range(2))
    _train(slept, 1)
    slept.save_checkpoint(Path(awake.config.model_path) / "checkpoint")
    awake.load_checkpoint(Path(awake.config.model_path) / "checkpoint")
    before = torch.cuda.memory_allocated(DEVICE)
    slept.to_host()
    num_bytes = sum(parameter.numel() for parameter in slept._parameters.values()) * 12
    assert before - torch.cuda.memory_allocated(DEVICE) >= num_bytes
    with pytest.raises(RuntimeError, match=r"FsdpEngine\.logprobs: the weights are in host memory"):
        slept.logprobs(_batches())
    with pytest.raises(RuntimeError, match=r"FsdpEngine\.to_host: .* host memory already"):
        slept.to_host()
    with pytest.raises(RuntimeError, match=r"the weights are in host memory"):
        slept.save_checkpoint(Path("nowhere"))
    slept.to_device()
    assert _differing(awake, slept) == []
    _train(slept, 1)
    assert slept.policy_version == 2


def test_moments_in_eight_bits_sleep_and_are_saved(save_model: SaveModel, tmp_path: Path) -> None:
    """A checkpoint and a stay in host memory bring the same bits back, and training goes on."""
    pytest.importorskip("torchao")
    folder = save_model(hidden_size=256)
    awake, slept = (
        FsdpEngine(_config(folder, eight_bit_moments=True), device=DEVICE) for _ in range(2)
    )
    _train(slept, 2)
    slept.save_checkpoint(tmp_path / "checkpoint")
    awake.load_checkpoint(tmp_path / "checkpoint")
    slept.to_host()
    slept.to_device()
    assert _differing(awake, slept) == []
    _train(slept, 1)
    assert slept.policy_version == 3


def test_a_background_checkpoint_holds_the_state_at_the_call(
    save_model: SaveModel, tmp_path: Path
) -> None:
    """Staged from the GPU, written while training goes on, loaded on the GPU: the same bits."""
    engine, other = (FsdpEngine(_config(save_model()), device=DEVICE) for _ in range(2))
    _train(engine, 1)
    engine.save_checkpoint(tmp_path / "step1")
    pending = engine.begin_checkpoint(tmp_path / "again")
    _train(engine, 2)
    pending.wait()
    engine.load_checkpoint(tmp_path / "again")
    other.load_checkpoint(tmp_path / "step1")
    assert _differing(engine, other) == []


def test_a_scorer_is_the_policy_at_version_0(save_model: SaveModel) -> None:
    """Bit for bit, also after its weights were away."""
    config = _config(save_model())
    engine, scorer = FsdpEngine(config, device=DEVICE), FsdpScorer(config, device=DEVICE)
    first = engine.logprobs(_batches())
    _train(engine, 1)
    scorer.to_host()
    scorer.to_device()
    scored = scorer.logprobs(_batches())
    assert all(torch.equal(left, right) for left, right in zip(first, scored, strict=True))


def test_two_deterministic_runs_are_the_same(
    save_model: SaveModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three steps of two engines leave the same bits; a resumed one too."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    config = _config(save_model(), deterministic=True)
    first, second = (FsdpEngine(config, device=DEVICE) for _ in range(2))
    _train(first, 3)
    _train(second, 1)
    folder = Path(config.model_path) / "checkpoint"
    second.save_checkpoint(folder)
    resumed = FsdpEngine(config, device=DEVICE)
    resumed.load_checkpoint(folder)
    _train(second, 2)
    _train(resumed, 2)
    assert _differing(first, second) == []
    assert _differing(first, resumed) == []
