"""Inputs of blocks that wait in the host's memory: nothing but their place changes.

What a device's streams do is tested in test_gpu.py; here copies are there when they are asked for.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from engine_fsdp import FsdpConfig, FsdpEngine, LoraConfig, OptimConfig
from engine_fsdp.block_inputs import InputsOnHost
from engine_fsdp.model import PackedCausalLM, load_model, pack_rows
from rl_contracts.packing import pack
from rl_contracts.rollout import PolicyVersion, Trajectory
from rl_contracts.train import LossOutput, PackedBatch

SaveModel = Callable[..., Path]


def _trajectory(index: int, length: int) -> Trajectory:
    return Trajectory(
        trajectory_id=str(index),
        group_id="group",
        token_ids=tuple((11 * index + 7 * place) % 37 for place in range(length)),
        loss_mask=tuple(place > 0 for place in range(length)),
        rollout_logprobs=(0.0,) * length,
        oldest_version=PolicyVersion(0),
        newest_version=PolicyVersion(0),
    )


def _batches() -> list[PackedBatch]:
    """Four micro-batches of one or two sequences, the second of which is the longest."""
    rows = [_trajectory(index, length) for index, length in enumerate((9, 20, 7, 11, 5, 16))]
    batches = pack(rows, [1.0, -1.0, 2.0, 0.5, 1.5, -3.0], max_tokens=20)[0]
    assert len(batches) == 4
    return batches


def _loss(policy_logprobs: Float[Tensor, " tokens"], batch: PackedBatch) -> LossOutput:
    per_token = batch.advantages.repeat_interleave(batch.cu_seqlens.diff())
    return LossOutput(loss=-(policy_logprobs * per_token).sum() / 62, metrics={})


def _engine(monkeypatch: pytest.MonkeyPatch, folder: Path, **changes: Any) -> FsdpEngine:  # noqa: ANN401
    """On the CPU, where the engine refuses settings that have no effect there."""
    monkeypatch.setattr("engine_fsdp.devices._refuse_on_cpu", lambda _: None)
    config = FsdpConfig(
        model_path=str(folder), optim=OptimConfig(learning_rate=0.01), compute_dtype="float32"
    )
    return FsdpEngine(attrs.evolve(config, **changes), device=torch.device("cpu"))


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("qwen3", {}),
        ("llama", {"compute_dtype": "bfloat16"}),
        ("qwen3_moe", {}),
        ("qwen3", {"freeze": ("model.embed_tokens.*", "model.layers.0.*")}),
        ("qwen3", {"lora": LoraConfig(rank=2)}),
    ],
    ids=["qwen3", "llama in bfloat16", "experts", "frozen", "adapters"],
)
def test_steps_are_those_without_bit_for_bit(
    save_model: SaveModel, monkeypatch: pytest.MonkeyPatch, kind: str, changes: dict[str, Any]
) -> None:
    """Two steps of four packed micro-batches through three blocks end at the same bits."""
    if "lora" in changes:
        pytest.importorskip("peft")
    folder = save_model(kind, num_hidden_layers=3)
    exported = []
    for offloaded in (False, True):
        engine = _engine(
            monkeypatch,
            folder,
            activation_checkpointing="full",
            offload_activations=offloaded,
            **changes,
        )
        for _ in range(2):
            engine.forward_backward(_batches(), _loss)
            engine.optim_step()
        exported.append({**dict(engine.export_weights())})
        exported[-1]["logprobs"] = torch.cat(engine.logprobs(_batches()))
    plain, offloaded_weights = exported
    assert all(torch.equal(plain[name], offloaded_weights[name]) for name in plain)


def _wrapped(folder: Path, inputs: InputsOnHost) -> PackedCausalLM:
    model = load_model(folder, temperature=1.0)
    model.wrap_blocks(checkpointing="full", compiled=False, inputs=inputs)
    return model


def _kept_elsewhere(model: PackedCausalLM, length: int) -> tuple[Tensor, list[Tensor]]:
    """A forward pass, and the inputs of its blocks as they were."""
    seen: list[Tensor] = []
    hooks = [
        block.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
        for block in model.blocks
    ]
    logprobs: Tensor = model(*pack_rows([torch.arange(length) % 37])).logprobs
    for hook in hooks:
        hook.remove()
    return logprobs, seen


def test_what_comes_back_is_a_copy_and_buffers_are_used_again(save_model: SaveModel) -> None:
    """Inputs that are overwritten after the forward pass do not matter, but for the last block's,
    which has not left yet. Then three buffers lie ready, and serve every pass that is not longer.
    """
    inputs = InputsOnHost()
    model = _wrapped(save_model("qwen3", num_hidden_layers=3), inputs)

    def gradients() -> list[Tensor]:
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    logprobs, _ = _kept_elsewhere(model, 30)
    logprobs.sum().backward()
    expected = [gradient.clone() for gradient in gradients()]
    model.zero_grad()
    logprobs, seen = _kept_elsewhere(model, 30)
    assert len(seen) == 3
    for tensor in seen[:2]:
        tensor.fill_(torch.nan)
    assert inputs._buffers == []
    logprobs.sum().backward()
    assert all(torch.equal(*pair) for pair in zip(gradients(), expected, strict=True))
    del logprobs
    sizes = [buffer.nbytes for buffer in inputs._buffers]
    assert sizes == [30 * 32 * 4] * 3
    places = {buffer.data_ptr() for buffer in inputs._buffers}
    _kept_elsewhere(model, 20)[0].sum().backward()
    assert {buffer.data_ptr() for buffer in inputs._buffers} == places
    _kept_elsewhere(model, 31)[0].sum().backward()
    assert [buffer.nbytes for buffer in inputs._buffers] == [31 * 32 * 4] * 3


def test_no_input_stays_on_the_device(save_model: SaveModel) -> None:
    """Between forward and backward the last block's alone is held; after a pass that no backward
    pass follows, `settle` lets it go too, and the next pass is not disturbed.
    """
    inputs = InputsOnHost()
    model = _wrapped(save_model("qwen3", num_hidden_layers=3), inputs)
    logprobs, seen = _kept_elsewhere(model, 12)
    assert inputs._leaving is not None
    assert inputs._coming is None
    assert inputs._leaving.tensor.data_ptr() == seen[-1].data_ptr()
    del logprobs
    inputs.settle()
    assert inputs._leaving is None
    _kept_elsewhere(model, 12)[0].sum().backward()
    assert inputs._leaving is inputs._coming is None


def test_a_block_whose_input_is_not_kept_is_an_error() -> None:
    """A setting that changes nothing would be inert."""
    weight = torch.ones(3, requires_grad=True)
    wrapped = InputsOnHost().wrap(lambda hidden: hidden + weight)
    with pytest.raises(RuntimeError, match=r"offload_activations = True, but the block's input"):
        wrapped(torch.ones(3))
    with torch.no_grad():
        assert wrapped(torch.ones(3)).tolist() == [2.0, 2.0, 2.0]
