"""Mixtures of experts: stacked in memory, one by one in the folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from engine_fsdp import FsdpConfig, FsdpEngine, OptimConfig
from engine_fsdp.model import load_model
from rl_contracts import expert_layout
from rl_contracts.packing import pack
from rl_contracts.rollout import PolicyVersion, Trajectory
from rl_contracts.train import LossOutput, PackedBatch

SaveModel = Callable[..., Path]

EXPERTS = "model.layers.1.mlp.experts"
LENGTHS = (7, 3, 9, 5)
ADVANTAGES = (1.0, -0.5, 2.0, -1.0)
PROMPT_LENGTH = 2
LEARNING_RATE = 0.1
EPS = 1.0
"""With an eps of 1 the first step is nearly linear in the gradient, so it shows every part."""


def _engine(folder: Path, **changes: object) -> FsdpEngine:
    settings: dict[str, object] = {
        "model_path": str(folder),
        "optim": OptimConfig(learning_rate=LEARNING_RATE, eps=EPS, max_grad_norm=None),
        "compute_dtype": "float32",
        **changes,
    }
    return FsdpEngine(FsdpConfig(**settings), device=torch.device("cpu"))  # type: ignore[arg-type]


def _trajectories() -> list[Trajectory]:
    return [
        Trajectory(
            trajectory_id=f"row{index}",
            group_id="group",
            token_ids=tuple((13 * index + 5 * place) % 37 for place in range(length)),
            loss_mask=tuple(place >= PROMPT_LENGTH for place in range(length)),
            rollout_logprobs=(0.0,) * length,
            oldest_version=PolicyVersion(0),
            newest_version=PolicyVersion(0),
        )
        for index, length in enumerate(LENGTHS)
    ]


def _loss(policy_logprobs: Tensor, batch: PackedBatch) -> LossOutput:
    per_token = batch.advantages.repeat_interleave(batch.cu_seqlens.diff())
    return LossOutput(loss=-(policy_logprobs * per_token).sum() / 16, metrics={})


def _change_weights(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_export_is_the_folder_bit_for_bit(save_model: SaveModel, dtype: torch.dtype) -> None:
    """Experts come back one by one under the stored names, each in memory of its own (A42)."""
    folder = save_model("qwen3_moe", dtype=dtype)
    exported = list(
        _engine(folder, compute_dtype=str(dtype).removeprefix("torch.")).export_weights()
    )
    stored = load_file(folder / "model.safetensors")
    assert sorted(name for name, _ in exported) == sorted(stored)
    assert f"{EXPERTS}.4.up_proj.weight" in stored
    for name, tensor in exported:
        assert tensor.dtype == dtype
        assert torch.equal(tensor, stored[name]), name
    assert len({tensor.untyped_storage().data_ptr() for _, tensor in exported}) == len(stored)


@pytest.mark.usefixtures("process_group")
def test_one_step_equals_plain_transformers(save_model: SaveModel, tmp_path: Path) -> None:
    """Logprobs, gradient norm and the weights after one AdamW step, saved by transformers.

    The plain model runs eager attention and experts, one row at a time. Some experts see no token.
    """
    folder = save_model("qwen3_moe", num_experts=16)
    plain: Any = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", experts_implementation="eager"
    )
    optimizer = torch.optim.AdamW(plain.parameters(), lr=LEARNING_RATE, eps=EPS, weight_decay=0.01)
    loss = torch.zeros(())
    expected: list[Tensor] = []
    for row, advantage in zip(_trajectories(), ADVANTAGES, strict=True):
        ids = torch.tensor(row.token_ids)
        log_p = plain(ids[None]).logits[0, :-1].log_softmax(-1)
        sampled = log_p.gather(1, ids[1:, None])[PROMPT_LENGTH - 1 :, 0]
        expected.append(sampled.detach())
        loss = loss - advantage * sampled.sum() / 16
    loss.backward()
    experts = plain.get_submodule(EXPERTS)
    idle = experts.gate_up_proj.grad.abs().sum((1, 2)) == 0
    assert 0 < idle.sum() < 16
    norm = torch.nn.utils.get_total_norm([each.grad for each in plain.parameters()])
    optimizer.step()
    plain.save_pretrained(tmp_path / "stepped")

    engine = _engine(folder)
    [batches] = pack(_trajectories(), ADVANTAGES, max_tokens=12)
    assert len(batches) > 1
    rows: dict[str, Tensor] = {}
    for batch, logprobs in zip(batches, engine.logprobs(batches), strict=True):
        pieces = logprobs.split(batch.cu_seqlens.diff().tolist())
        rows.update(zip(batch.trajectory_ids, pieces, strict=True))
    for index, sampled in enumerate(expected):
        got = rows[f"row{index}"][PROMPT_LENGTH:]
        torch.testing.assert_close(got, sampled, atol=1e-5, rtol=0.0)
    engine.forward_backward(batches, _loss)
    assert engine.optim_step().grad_norm == pytest.approx(norm.item(), rel=1e-5)
    stepped = load_file(tmp_path / "stepped" / "model.safetensors")
    exported = dict(engine.export_weights())
    assert exported.keys() == stepped.keys()
    before = load_file(folder / "model.safetensors")
    for name, tensor in stepped.items():
        torch.testing.assert_close(exported[name], tensor, atol=1e-6, rtol=0.0, msg=name)
    # a tolerance far below what the step moves
    assert max((stepped[name] - before[name]).abs().max() for name in stepped) > 1e-3


@pytest.mark.usefixtures("process_group")
def test_bfloat16_computes_near_float32(save_model: SaveModel) -> None:
    """Grouped products in bfloat16, with recomputed activations: within a tenth of the norm."""
    folder = save_model("qwen3_moe")
    [batches] = pack(_trajectories(), ADVANTAGES, max_tokens=100)
    norms = []
    for changes in ({}, {"compute_dtype": "bfloat16", "activation_checkpointing": "full"}):
        engine = _engine(folder, **changes)
        engine.forward_backward(batches, _loss)
        norms.append(engine.optim_step().grad_norm)
    assert norms[0] != norms[1]
    assert norms[1] == pytest.approx(norms[0], rel=0.1)


def test_grouped_products_run(save_model: SaveModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two per layer, for all experts at once, and none in the eager pass they are compared with."""
    calls: list[int] = []
    original = torch.nn.functional.grouped_mm

    def counted(rows: Tensor, weights: Tensor, **others: Any) -> Tensor:  # noqa: ANN401
        calls.append(weights.shape[0])
        return original(rows, weights, **others)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", counted)
    load_model(save_model("qwen3_moe"), temperature=1.0)
    assert calls == [5] * 2 * 2 * 3  # projections, layers, probes


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda tensors: [
                tensors.pop(f"{EXPERTS}.2.{each}_proj.weight") for each in ("gate", "up", "down")
            ],
            r"mismatched_keys.*experts\.down_proj.*\[4, 32, 24\].*\[5, 32, 24\]",
        ),
        (
            lambda tensors: tensors.pop(f"{EXPERTS}.3.gate_proj.weight"),
            r"qwen3_moe: transformers cannot load the weights: ",
        ),
        (
            lambda tensors: tensors.update(
                {f"{EXPERTS}.7.down_proj.weight": tensors.pop(f"{EXPERTS}.2.down_proj.weight")}
            ),
            r"does not know.*1 differ.*experts\.2\.down_proj\.weight.*under no such name",
        ),
    ],
)
def test_an_expert_that_is_not_there_is_an_error(
    save_model: SaveModel, change: Callable[[dict[str, Tensor]], object], text: str
) -> None:
    """One missing, in whole or in part, or under another number: nothing is drawn at random."""
    folder = save_model("qwen3_moe")
    _change_weights(folder, change)
    with pytest.raises(ValueError, match=text):
        load_model(folder, temperature=1.0)


def test_unknown_layouts_are_refused(save_model: SaveModel) -> None:
    """Mixtral's folder has other names for router and experts, which are not made up here."""
    with pytest.raises(
        ValueError, match=r"renames or converts weights of MixtralForCausalLM.*does not know.*gate"
    ):
        load_model(save_model("mixtral"), temperature=1.0)


@pytest.mark.parametrize(
    "gate_up", [("up_proj", "gate_proj"), ("gate_proj", "up_proj")], ids=["swapped", "as it is"]
)
def test_rows_are_compared_with_the_folder(
    save_model: SaveModel, monkeypatch: pytest.MonkeyPatch, gate_up: tuple[str, str]
) -> None:
    """If gate and up projection of equal shapes were taken for each other, loading would tell."""
    stacks = {"gate_up_proj": gate_up, "down_proj": ("down_proj",)}
    monkeypatch.setattr(expert_layout, "_STACKS", stacks)
    folder = save_model("qwen3_moe")
    if gate_up[0] == "gate_proj":
        load_model(folder, temperature=1.0)
        return
    with pytest.raises(ValueError, match=r"20 differ.*gate_proj.*is stored with shape \(24, 32\)"):
        load_model(folder, temperature=1.0)


@pytest.mark.usefixtures("process_group")
def test_a_folder_with_stacks_gets_stacks(save_model: SaveModel) -> None:
    """The folder decides: what it holds in one tensor is exported in one."""
    folder = save_model("qwen3_moe")

    def stack(tensors: dict[str, Tensor]) -> None:
        parts = [tensors.pop(f"{EXPERTS}.{index}.down_proj.weight") for index in range(5)]
        tensors[f"{EXPERTS}.down_proj"] = torch.stack(parts)

    _change_weights(folder, stack)
    exported = dict(_engine(folder).export_weights())
    stored = load_file(folder / "model.safetensors")
    assert exported.keys() == stored.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in stored.items())


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"moe_intermediate_size": 12}, r"in multiples of 8.*got shape \(5, 32, 12\)"),
        ({"output_router_logits": True}, r"expected output_router_logits false in config\.json"),
    ],
)
def test_models_that_would_not_run_as_configured_are_refused(
    save_model: SaveModel, changes: dict[str, object], text: str
) -> None:
    """Sizes that the grouped product cannot take, and a loss that no one would add."""
    with pytest.raises(ValueError, match=text):
        load_model(save_model("qwen3_moe", **changes), temperature=1.0)


def test_a_systematic_difference_is_found_in_every_comparison(
    save_model: SaveModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts that compute something else than eager ones are refused, also with three tries."""
    original = torch.nn.functional.grouped_mm

    def scaled(*args: Any, **others: Any) -> Tensor:  # noqa: ANN401
        return 1.1 * original(*args, **others)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", scaled)
    with pytest.raises(ValueError, match=r"Qwen3MoeForCausalLM differ by up to .* nats.*experts"):
        load_model(save_model("qwen3_moe"), temperature=1.0)
