"""The engine on a GPU against that on the CPU, which other tests compare with transformers."""

import gc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.distributed.tensor import DTensor

from engine_fsdp import FsdpConfig, FsdpEngine, OptimConfig
from parallel_state.process_group import init_process_group
from rl_contracts.packing import pack
from rl_contracts.rollout import PolicyVersion, Trajectory
from rl_contracts.train import LossOutput, PackedBatch

SaveModel = Callable[..., Path]

CPU = torch.device("cpu")
LENGTHS = (2, 40, 7, 133, 9, 64)
NUM_SCORED = sum(LENGTHS) - len(LENGTHS)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
    pytest.mark.filterwarnings("ignore"),  # torch.compile and NCCL have warnings of their own
]


@pytest.fixture(autouse=True)
def process_group() -> Iterator[None]:
    """A process group that serves both devices."""
    init_process_group(backend="cpu:gloo,cuda:nccl")
    yield
    dist.destroy_process_group()
    torch.compiler.reset()


def _engine(folder: Path, device: torch.device, **changes: Any) -> FsdpEngine:  # noqa: ANN401
    settings: dict[str, Any] = {
        "model_path": str(folder),
        "optim": OptimConfig(learning_rate=1e-3),
        "compute_dtype": "float32",
        **changes,
    }
    return FsdpEngine(FsdpConfig(**settings), device=device)


def _rows(lengths: Sequence[int]) -> list[Trajectory]:
    return [
        Trajectory(
            trajectory_id=f"row{index}",
            group_id="g",
            token_ids=tuple((11 * index + 7 * place + place * place) % 37 for place in range(n)),
            loss_mask=tuple(place > 0 for place in range(n)),
            rollout_logprobs=(-1.0,) * n,
            oldest_version=PolicyVersion(0),
            newest_version=PolicyVersion(0),
        )
        for index, n in enumerate(lengths)
    ]


def _batches(max_tokens: int = 1000) -> list[PackedBatch]:
    rows = _rows(LENGTHS)
    advantages = [1.0, -2.0, 0.5, 3.0, -1.0, 1.5]
    return pack(rows, advantages, max_tokens=max_tokens)[0]


def _loss(policy_logprobs: Float[Tensor, " tokens"], batch: PackedBatch) -> LossOutput:
    per_token = batch.advantages.repeat_interleave(batch.cu_seqlens.diff())
    return LossOutput(loss=-(policy_logprobs * per_token).sum() / NUM_SCORED, metrics={})


def _gradients(engine: FsdpEngine, batches: list[PackedBatch]) -> dict[str, Tensor]:
    engine.forward_backward(batches, _loss)
    return {
        name: parameter.grad.full_tensor().cpu()
        for name, parameter in engine._model.named_parameters()
        if isinstance(parameter.grad, DTensor)
    }


def _relative(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Distance of two gradients, relative to the second."""
    assert got.keys() == expected.keys()
    square = sum((got[name] - tensor).square().sum().item() for name, tensor in expected.items())
    total = sum(tensor.square().sum().item() for tensor in expected.values())
    return float((square / total) ** 0.5)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_float32_is_that_of_the_cpu(save_model: SaveModel, kind: str) -> None:
    """Log-probabilities to 1e-4 nats, entropies too, and gradients to 1e-4, in float32."""
    folder = save_model(kind)
    plain = torch.get_float32_matmul_precision()
    assert plain == "highest"
    cpu, gpu = _engine(folder, CPU), _engine(folder, torch.device("cuda", 0))
    batches = _batches()
    for got, expected in zip(
        gpu.token_statistics(batches), cpu.token_statistics(batches), strict=True
    ):
        torch.testing.assert_close(got.logprobs.cpu(), expected.logprobs, atol=1e-4, rtol=0.0)
        torch.testing.assert_close(got.entropies.cpu(), expected.entropies, atol=1e-4, rtol=0.0)
    assert _relative(_gradients(gpu, batches), _gradients(cpu, batches)) < 1e-4


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_bfloat16_is_near_float32(save_model: SaveModel, kind: str) -> None:
    """torch's variable-length attention: logprobs on average within 0.02 nats, gradients to 5%.

    Packed and one sequence at a time agree as well, and equal what the CPU has in float32.
    """
    folder = save_model(kind, std=0.05)
    cpu = _engine(folder, CPU)
    gpu = _engine(folder, torch.device("cuda", 0), compute_dtype="bfloat16")
    expected = torch.cat(cpu.logprobs(_batches()))
    together = torch.cat(gpu.logprobs(_batches())).cpu()
    alone = torch.cat(gpu.logprobs(_batches(max_tokens=max(LENGTHS)))).cpu()
    assert (together - expected).abs().mean() < 0.02
    assert (alone.sum() - together.sum()).abs() / NUM_SCORED < 0.005
    assert _relative(_gradients(gpu, _batches()), _gradients(cpu, _batches())) < 0.05


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
def test_compiled_blocks_compute_the_same(
    save_model: SaveModel, kind: str, checkpointing: str
) -> None:
    """Compiled or not, recomputed or not: the same gradient up to bfloat16's rounding."""
    folder = save_model(kind, std=0.05)
    device = torch.device("cuda", 0)
    eager = _engine(folder, device, compute_dtype="bfloat16")
    compiled = _engine(
        folder,
        device,
        compute_dtype="bfloat16",
        compile_blocks=True,
        activation_checkpointing=checkpointing,
    )
    for batches in (_batches(), _batches(150)):  # other numbers of tokens and sequences
        assert _relative(_gradients(compiled, batches), _gradients(eager, batches)) < 0.03
        compiled.optim_step()
        eager.optim_step()


def test_no_token_sees_another_sequence(save_model: SaveModel) -> None:
    """Changing one sequence leaves the others' log-probabilities bit-identical."""
    gpu = _engine(save_model("qwen3"), torch.device("cuda", 0), compute_dtype="bfloat16")
    [batch] = _batches()
    starts = batch.cu_seqlens.tolist()
    [before] = gpu.logprobs([batch])
    batch.token_ids[starts[3] : starts[4]] = 5
    [after] = gpu.logprobs([batch])
    assert torch.equal(before[: starts[3]], after[: starts[3]])
    assert torch.equal(before[starts[4] :], after[starts[4] :])
    assert not torch.equal(before, after)


def test_steps_and_export(save_model: SaveModel) -> None:
    """Ten steps raise the objective; what is exported lies on the GPU and is the caller's own."""
    gpu = _engine(save_model("qwen3"), torch.device("cuda", 0), compute_dtype="bfloat16")
    [batch] = _batches()
    before = gpu.logprobs([batch])[0]
    for _ in range(10):
        gpu.forward_backward([batch], _loss)
        gpu.optim_step()
    after = gpu.logprobs([batch])[0]
    assert _loss(after.cpu(), batch).loss < _loss(before.cpu(), batch).loss
    assert {tensor.device.type for _, tensor in gpu.export_weights()} == {"cuda"}


def test_offloaded_parameters_train_alike(save_model: SaveModel) -> None:
    """Weights, gradient and optimizer in host memory: the same weights after two steps to 1e-6."""
    folder = save_model("qwen3")
    exported = []
    for offload in ("none", "parameters"):
        gpu = _engine(folder, torch.device("cuda", 0), offload=offload)
        for _ in range(2):
            gpu.forward_backward(_batches(150), _loss)
            gpu.optim_step()
        exported.append(dict(gpu.export_weights()))
    for name, tensor in exported[0].items():
        torch.testing.assert_close(exported[1][name].cpu(), tensor.cpu(), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("compiled", [False, True])
def test_inputs_that_wait_on_the_host(
    save_model: SaveModel,
    compiled: bool,  # noqa: FBT001
) -> None:
    """Gradients of micro-batches of 16384 and fewer tokens are those of inputs on the device, up to
    the order of sums in attention; of the 16 blocks' inputs, 8 MiB each, at most two are there.
    """
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 16}
    folder = save_model("qwen3", std=0.02, **sizes)
    rows = _rows((512,) * 32 + (300,) * 20 + (512,) * 32)
    batches = pack(rows, [1.0, -2.0, 0.5] * 28, max_tokens=16384)[0]
    most = max(batch.token_ids.shape[0] for batch in batches)
    gradients, peaks = [], []
    for offloaded in (False, True):
        gpu = _engine(
            folder,
            torch.device("cuda", 0),
            compute_dtype="bfloat16",
            activation_checkpointing="full",
            compile_blocks=compiled,
            offload_activations=offloaded,
        )
        gradients.append(_gradients(gpu, batches))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gpu.forward_backward(batches, _loss)
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del gpu
        gc.collect()
    assert _relative(*gradients) < 0.01
    assert peaks[0] - peaks[1] > 12 * most * 256 * 2
