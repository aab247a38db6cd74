"""Adapters and frozen weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from jaxtyping import Float
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from engine_fsdp import FsdpConfig, FsdpEngine, LoraConfig, MuonConfig, OptimConfig
from rl_contracts.packing import pack
from rl_contracts.rollout import PolicyVersion, Trajectory
from rl_contracts.train import LossOutput, PackedBatch

SaveModel = Callable[..., Path]

pytestmark = pytest.mark.usefixtures("process_group")

LORA = LoraConfig(rank=3, alpha=7.0, seed=5)


def _engine(folder: Path, **changes: object) -> FsdpEngine:
    settings: dict[str, object] = {
        "model_path": str(folder),
        "optim": OptimConfig(learning_rate=0.05),
        "compute_dtype": "float32",
        **changes,
    }
    return FsdpEngine(FsdpConfig(**settings), device=torch.device("cpu"))  # type: ignore[arg-type]


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


def _train(engine: FsdpEngine, steps: int = 2) -> None:
    for _ in range(steps):
        engine.forward_backward(_batches(), _loss)
        engine.optim_step()


@pytest.fixture
def peft() -> Any:  # noqa: ANN401
    """The package, where it is installed."""
    return pytest.importorskip("peft")


@pytest.mark.parametrize("tied", [True, False])
def test_merged_weights_are_those_that_peft_merges(
    save_model: SaveModel,
    tmp_path: Path,
    peft: Any,  # noqa: ANN401
    tied: bool,  # noqa: FBT001
) -> None:
    """The saved adapter, loaded and merged by peft, gives the exported weights bit for bit, under
    the folder's names; tied embeddings are still one; what has no adapter has not moved (A48).
    """
    folder = save_model("qwen2", tie_word_embeddings=tied)
    engine = _engine(folder, lora=LORA)
    _train(engine)
    exported = dict(engine.export_weights())
    engine.save_adapter(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    merged = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload()
    expected = dict(merged.named_parameters())
    stored = load_file(folder / "model.safetensors")
    assert exported.keys() == expected.keys() == stored.keys()
    assert ("lm_head.weight" in exported) is not tied
    for name, weight in exported.items():
        assert torch.equal(weight, expected[name]), name
        adapted = name.rpartition(".")[0].rpartition(".")[2] in LORA.target_modules
        has_moved = not torch.equal(weight, stored[name])
        assert has_moved is (adapted and name.endswith(".weight")), name


def test_a_new_adapter_changes_nothing_and_the_reference_stays(
    save_model: SaveModel,
    peft: Any,  # noqa: ANN401, ARG001
) -> None:
    """At version 0 adapted and plain policy agree bit for bit; after training `ref_logprobs` still
    says so, and `logprobs` does not.
    """
    folder = save_model()
    plain = _engine(folder).logprobs(_batches())
    engine = _engine(folder, lora=LORA)
    assert all(
        torch.equal(left, right)
        for left, right in zip(engine.logprobs(_batches()), plain, strict=True)
    )
    _train(engine)
    for trained, reference, first in zip(
        engine.logprobs(_batches()), engine.ref_logprobs(_batches()), plain, strict=True
    ):
        assert torch.equal(reference, first)
        assert not torch.equal(trained, first)


def test_a_checkpoint_holds_adapters_and_belongs_to_its_base(
    save_model: SaveModel,
    tmp_path: Path,
    peft: Any,  # noqa: ANN401, ARG001
) -> None:
    """Frozen weights are not written; resuming is bit for bit; beside other frozen weights it is
    refused, and nothing is loaded.
    """
    folder = save_model()
    engine = _engine(folder, lora=LORA)
    _train(engine, 1)
    engine.save_checkpoint(tmp_path / "step1")
    stored = load_file(tmp_path / "step1" / "rank-00000.safetensors")
    assert {name for name in stored if name.startswith("model.") and "lora_" not in name} == set()
    resumed = _engine(folder, lora=LORA)
    resumed.load_checkpoint(tmp_path / "step1")
    for each in (engine, resumed):
        _train(each, 1)
    weights, others = (dict(each.export_weights()) for each in (engine, resumed))
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    _train(plain := _engine(folder))
    plain.save_pretrained(tmp_path / "other")
    elsewhere = _engine(tmp_path / "other", lora=LORA)
    before = dict(elsewhere.export_weights())
    with pytest.raises(ValueError, match=r"other frozen weights: 24 of 24 differ, the first is"):
        elsewhere.load_checkpoint(tmp_path / "step1")
    with pytest.raises(ValueError, match=r"beside 24 frozen weights, here are 1; resume with the"):
        _engine(folder, freeze=("*embed*",)).load_checkpoint(tmp_path / "step1")
    after = dict(elsewhere.export_weights())
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens", "experts", "q_projection"])
def test_a_target_that_would_take_no_effect_is_refused(
    save_model: SaveModel,
    peft: Any,  # noqa: ANN401, ARG001
    target: str,
) -> None:
    """The head's weight is used without its module, so that an adapter there would be inert."""
    lora = LoraConfig(target_modules=("q_proj", target))
    with pytest.raises(
        ValueError, match=rf"'{target}' names no linear layer inside .* has k_proj, o_proj, q_proj"
    ):
        _engine(save_model("qwen3_moe"), lora=lora)


def test_without_adapters_what_needs_them_names_what_to_call(save_model: SaveModel) -> None:
    """Two calls, two answers."""
    engine = _engine(save_model())
    with pytest.raises(RuntimeError, match=r"ref_logprobs: .* call FsdpScorer\.logprobs"):
        engine.ref_logprobs(_batches())
    with pytest.raises(RuntimeError, match=r"save_adapter: .* call save_pretrained"):
        engine.save_adapter(Path("nowhere"))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"freeze": ("*norm*",)}, r"lora and freeze: the adapters freeze all other weights"),
        ({"muon": MuonConfig()}, r"lora and muon: its rule is for whole weights"),
    ],
)
def test_settings_that_exclude_each_other(changes: dict[str, Any], text: str) -> None:
    """Refused at construction."""
    optim = OptimConfig(learning_rate=0.1)
    with pytest.raises(ValueError, match=text):
        FsdpConfig(model_path="model", optim=optim, lora=LORA, **changes)


def test_frozen_weights_stay_and_the_others_move(save_model: SaveModel) -> None:
    """The gradient's norm is that of the trained part alone."""
    folder = save_model()
    patterns = ("model.embed_tokens.weight", "model.layers.0.*")
    engine, whole = _engine(folder, freeze=patterns), _engine(folder)
    before = dict(engine.export_weights())
    for each in (engine, whole):
        each.forward_backward(_batches(), _loss)
    trained = [p.grad for n, p in whole._parameters.items() if n in engine._parameters]
    squares = [grad.full_tensor().double().square().sum() for grad in trained]  # type: ignore[union-attr]
    expected = torch.stack(squares).sum().sqrt().item()
    assert engine.optim_step().grad_norm == pytest.approx(expected, rel=1e-5)
    for name, weight in engine.export_weights():
        is_frozen = name == patterns[0] or name.startswith("model.layers.0.")
        assert torch.equal(weight, before[name]) is is_frozen, name


@pytest.mark.parametrize(
    ("patterns", "text"),
    [
        (("lm_head.*",), r"freeze: 'lm_head\.\*' matches no parameter; they are named like model"),
        (("*",), r"freeze: '\*' leave nothing to train"),
    ],
)
def test_freezing_nothing_and_everything_is_refused(
    save_model: SaveModel, patterns: tuple[str, ...], text: str
) -> None:
    """A tied head has no parameter of its own."""
    with pytest.raises(ValueError, match=text):
        _engine(save_model(), freeze=patterns)
