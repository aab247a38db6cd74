"""The engine in one process."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jaxtyping import Float
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from engine_fsdp import FsdpConfig, FsdpEngine, OptimConfig
from parallel_state import ParallelState
from parallel_state.process_group import init_process_group
from rl_contracts.packing import pack
from rl_contracts.rollout import PolicyVersion, Trajectory
from rl_contracts.train import Checkpointable, LossOutput, PackedBatch, TrainEngine

SaveModel = Callable[..., Path]

CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("process_group")


def _engine(folder: Path, **changes: object) -> FsdpEngine:
    settings: dict[str, object] = {
        "model_path": str(folder),
        "optim": OptimConfig(learning_rate=0.01),
        "compute_dtype": "float32",
        **changes,
    }
    return FsdpEngine(FsdpConfig(**settings), device=CPU)  # type: ignore[arg-type]


def _trajectory(name: str, *, prompt: int, sampled: int) -> Trajectory:
    length = prompt + sampled
    return Trajectory(
        trajectory_id=name,
        group_id="group",
        token_ids=tuple((len(name) + 5 * place) % 37 for place in range(length)),
        loss_mask=(False,) * prompt + (True,) * sampled,
        rollout_logprobs=(0.0,) * length,
        oldest_version=PolicyVersion(0),
        newest_version=PolicyVersion(0),
    )


def _batches(max_tokens: int = 100) -> list[PackedBatch]:
    rows = [
        _trajectory("a", prompt=3, sampled=4),
        _trajectory("bb", prompt=1, sampled=6),
        _trajectory("ccc", prompt=2, sampled=2),
    ]
    return pack(rows, [1.0, -1.0, 2.0], max_tokens=max_tokens)[0]


def _loss(policy_logprobs: Float[Tensor, " tokens"], batch: PackedBatch) -> LossOutput:
    per_token = batch.advantages.repeat_interleave(batch.cu_seqlens.diff())
    return LossOutput(loss=-(policy_logprobs * per_token).sum() / 12, metrics={})


def _weights(engine: FsdpEngine) -> dict[str, Tensor]:
    return dict(engine.export_weights())


def test_it_is_a_train_engine(save_model: SaveModel) -> None:
    """The class fits both Protocols, for the type checker, at version 0 and with no checkpoint."""
    engine = _engine(save_model())
    as_engine: TrainEngine = engine
    as_checkpointable: Checkpointable = engine
    assert as_engine.policy_version == 0
    with pytest.raises(FileNotFoundError, match=r"there is no checkpoint"):
        as_checkpointable.load_checkpoint(Path("nowhere"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_export_is_the_checkpoint_bit_for_bit(
    save_model: SaveModel,
    dtype: torch.dtype,
    tied: bool,  # noqa: FBT001
) -> None:
    """Names, shapes and bits come back; a tied head is the embedding and not sent twice (A48)."""
    folder = save_model("qwen3", dtype=dtype, tie_word_embeddings=tied)
    name = str(dtype).removeprefix("torch.")
    exported = _weights(_engine(folder, compute_dtype=name))
    stored = load_file(folder / "model.safetensors")
    assert exported.keys() == stored.keys()
    assert ("lm_head.weight" in exported) is not tied
    for key, tensor in stored.items():
        assert exported[key].dtype == dtype
        assert torch.equal(exported[key], tensor), key


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_transformers_reads_a_saved_folder(
    save_model: SaveModel, tmp_path: Path, kind: str
) -> None:
    """After a step, every weight of the folder is the exported one, rounded to `export_dtype`."""
    source = save_model(kind, tie_word_embeddings=False)
    (source / "tokenizer.json").write_text("{}")
    engine = _engine(source, export_dtype="bfloat16")
    engine.forward_backward(_batches(), _loss)
    engine.optim_step()
    engine.save_pretrained(tmp_path / "trained")
    assert (tmp_path / "trained" / "tokenizer.json").read_text() == "{}"
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path / "trained", output_loading_info=True
    )
    model, report = loaded
    assert not any(report.values())
    assert model.dtype == torch.bfloat16
    saved = load_file(tmp_path / "trained" / "model.safetensors")
    exported = _weights(engine)
    assert saved.keys() == exported.keys() == load_file(source / "model.safetensors").keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in exported.items())


def test_exported_tensors_are_the_callers_own(save_model: SaveModel) -> None:
    """Overwriting what was exported changes no weight, and a step changes nothing exported."""
    engine = _engine(save_model())
    first = _weights(engine)
    copies = {name: tensor.clone() for name, tensor in first.items()}
    engine.forward_backward(_batches(), _loss)
    engine.optim_step()
    assert all(torch.equal(first[name], copies[name]) for name in first)
    stepped = _weights(engine)
    for tensor in _weights(engine).values():
        tensor.zero_()
    assert all(torch.equal(stepped[name], tensor) for name, tensor in _weights(engine).items())


def test_logprobs_equal_plain_transformers(save_model: SaveModel) -> None:
    """float32 logprobs of masked-in tokens to 1e-5, at the temperature; 0 for prompt tokens."""
    folder = save_model("llama")
    [batch] = _batches()
    [got] = _engine(folder, temperature=0.7).logprobs([batch])
    plain: Any = AutoModelForCausalLM.from_pretrained(folder)
    starts = batch.cu_seqlens.tolist()
    for begin, end in pairwise(starts):
        row = batch.token_ids[begin:end]
        with torch.no_grad():
            log_p = (plain(row[None]).logits[0, :-1] / 0.7).log_softmax(-1)
        expected = log_p.gather(1, row[1:, None])[:, 0] * batch.loss_mask[begin + 1 : end]
        torch.testing.assert_close(got[begin + 1 : end], expected, atol=1e-5, rtol=0.0)
        assert got[begin] == 0.0


def test_splitting_leaves_the_gradient_as_it_is(save_model: SaveModel) -> None:
    """One micro-batch, three, or the same in two calls: equal loss, gradient norm and weights."""
    folder = save_model()
    results = []
    for split in ("one", "three", "calls"):
        engine = _engine(folder)
        batches = _batches(100 if split == "one" else 8)
        assert len(batches) == (1 if split == "one" else 3)
        calls = [[batch] for batch in batches] if split == "calls" else [batches]
        loss = sum(engine.forward_backward(call, _loss)["loss"] for call in calls)
        results.append((loss, engine.optim_step().grad_norm))
    assert results[1] == pytest.approx(results[0], rel=1e-5)
    assert results[2] == pytest.approx(results[0], rel=1e-5)


def test_forward_backward_moves_no_weight_and_a_step_raises_the_version(
    save_model: SaveModel,
) -> None:
    """Weights change in `optim_step` alone, which counts; the gradient is used once."""
    engine = _engine(save_model())
    before = _weights(engine)
    engine.forward_backward(_batches(), _loss)
    assert all(torch.equal(before[name], tensor) for name, tensor in _weights(engine).items())
    assert engine.policy_version == 0
    assert engine.optim_step().policy_version == 1
    assert engine.policy_version == 1
    assert not torch.equal(before["model.norm.weight"], _weights(engine)["model.norm.weight"])
    with pytest.raises(RuntimeError, match=r"no gradient at policy version 1"):
        engine.optim_step()


def test_first_step_is_adamw_by_hand(save_model: SaveModel) -> None:
    """The first AdamW step moves each weight by the learning rate against its gradient's sign.

    With zero moments, m / sqrt(v) is the sign of the gradient, and decay takes off lr * 0.1 * w;
    the first of four warmup steps has a fourth of the learning rate.
    """
    optim = OptimConfig(
        learning_rate=0.04, weight_decay=0.1, eps=1e-12, warmup_steps=4, max_grad_norm=None
    )
    engine = _engine(save_model("llama"), optim=optim)
    before = _weights(engine)["model.norm.weight"]
    assert engine.learning_rate == pytest.approx(0.01)
    engine.forward_backward(_batches(), _loss)
    engine.optim_step()
    moved = _weights(engine)["model.norm.weight"] - before * (1 - 0.01 * 0.1)
    torch.testing.assert_close(moved.abs(), torch.full_like(moved, 0.01), atol=1e-6, rtol=1e-3)
    assert engine.learning_rate == pytest.approx(0.02)


def test_training_raises_the_logprob_of_good_tokens(save_model: SaveModel) -> None:
    """Ten steps on one row with advantage 1 raise its mean logprob, seen by `logprobs` at once."""
    engine = _engine(save_model())
    [[batch]] = pack([_trajectory("a", prompt=2, sampled=6)], [1.0], max_tokens=10)
    seen = []
    for _ in range(10):
        seen.append(engine.logprobs([batch])[0].sum().item())
        engine.forward_backward([batch], _loss)
        engine.optim_step()
    assert seen == sorted(seen)
    assert seen[-1] > seen[0] + 1.0


def test_bfloat16_computes_near_float32(save_model: SaveModel) -> None:
    """bfloat16 weights give logprobs within 0.1 nats of float32; masters are float32."""
    folder = save_model()
    [exact] = _engine(folder).logprobs(_batches())
    engine = _engine(folder, compute_dtype="bfloat16", export_dtype="float32")
    [rounded] = engine.logprobs(_batches())
    assert rounded.dtype == torch.float32
    assert not torch.equal(rounded, exact)
    torch.testing.assert_close(rounded, exact, atol=0.1, rtol=0.0)
    assert {tensor.dtype for tensor in _weights(engine).values()} == {torch.float32}


def test_a_step_below_bfloat16_resolution_is_kept(save_model: SaveModel) -> None:
    """Many steps too small for bfloat16 add up in the float32 masters."""
    optim = OptimConfig(learning_rate=1e-4, weight_decay=0.0)
    engine = _engine(save_model(), optim=optim, compute_dtype="bfloat16", export_dtype="float32")
    before = _weights(engine)["model.norm.weight"]
    engine.forward_backward(_batches(), _loss)
    engine.optim_step()
    moved = _weights(engine)["model.norm.weight"] - before
    assert 0.0 < moved.abs().max().item() < 2e-4


def test_nothing_to_learn_from_gives_a_zero_gradient(save_model: SaveModel) -> None:
    """A micro-batch outside the loss mask: loss 0, gradient 0, no weight moves (A11).

    The second loss does not even touch the logprobs.
    """
    engine = _engine(save_model(), optim=OptimConfig(learning_rate=0.01, weight_decay=0.0))
    batches = [replace(batch, loss_mask=torch.zeros_like(batch.loss_mask)) for batch in _batches()]
    before = _weights(engine)

    def constant(_: Float[Tensor, " tokens"], __: PackedBatch) -> LossOutput:
        return LossOutput(loss=torch.zeros(()), metrics={})

    for loss_fn in (_loss, constant):
        assert engine.forward_backward(batches, loss_fn) == {"loss": 0.0}
        assert engine.optim_step().grad_norm == 0.0
    assert engine.logprobs(batches)[0].eq(0.0).all()
    assert all(torch.equal(before[name], tensor) for name, tensor in _weights(engine).items())


def test_a_loss_that_is_not_finite_names_its_trajectories(save_model: SaveModel) -> None:
    """The bad micro-batch is named, the gradient of the good ones is dropped, training goes on."""
    engine = _engine(save_model())
    batches = _batches(8)
    advantages = torch.full_like(batches[1].advantages, float("inf"))
    bad = [batches[0], replace(batches[1], advantages=advantages), batches[2]]
    before = _weights(engine)
    name = batches[1].trajectory_ids[0]
    with pytest.raises(
        FloatingPointError, match=rf"micro-batch 1 \(trajectories {name}\): (nan|-?inf)"
    ):
        engine.forward_backward(bad, _loss)
    with pytest.raises(RuntimeError, match=r"no gradient at policy version 0"):
        engine.optim_step()
    assert all(torch.equal(before[name], tensor) for name, tensor in _weights(engine).items())
    engine.forward_backward(batches, _loss)
    assert engine.optim_step().policy_version == 1


def test_a_gradient_that_is_not_finite_stops_the_step(save_model: SaveModel) -> None:
    """A finite loss with a gradient of nan: no weight, moment or version changes."""

    def nan_gradient(policy_logprobs: Float[Tensor, " tokens"], _: PackedBatch) -> LossOutput:
        # at 0 the square root is finite and its slope is not
        return LossOutput(loss=(policy_logprobs * 0.0).sqrt().sum(), metrics={})

    engine = _engine(save_model())
    before = _weights(engine)
    assert engine.forward_backward(_batches(), nan_gradient)["loss"] == 0.0
    with pytest.raises(FloatingPointError, match=r"norm is nan at policy version 0"):
        engine.optim_step()
    assert engine.policy_version == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in _weights(engine).items())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"positions": torch.zeros(18, dtype=torch.int64)}, r"positions that count from 0"),
        ({"loss_mask": torch.ones(18, dtype=torch.bool)}, r"first token of a sequence"),
        ({"token_ids": torch.full((18,), 37)}, r"token ids from 0 to 36, got 37 to 37"),
        (
            {"cu_seqlens": torch.tensor([0, 7, 14, 17], dtype=torch.int32)},
            r"rise from 0 to its 18 tokens, got \[0, 7, 14, 17\]",
        ),
    ],
)
def test_malformed_batches_are_named(
    save_model: SaveModel, change: dict[str, Tensor], text: str
) -> None:
    """What would train on garbage is refused with the micro-batch and its trajectories."""
    engine = _engine(save_model())
    bad = [replace(batch, **change) for batch in _batches()]  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=rf"micro-batch 0 \(trajectories a, bb, ccc\).*{text}"):
        engine.forward_backward(bad, _loss)
    with pytest.raises(ValueError, match=text):
        engine.logprobs(bad)


def test_no_micro_batches_are_refused(save_model: SaveModel) -> None:
    """An empty list would return a loss of nothing."""
    with pytest.raises(ValueError, match=r"at least one, got 0"):
        _engine(save_model()).forward_backward(list[PackedBatch](), _loss)


def test_a_detached_loss_is_refused(save_model: SaveModel) -> None:
    """A loss without gradient on tokens to learn from would train nothing without a word."""

    def detached(policy_logprobs: Float[Tensor, " tokens"], batch: PackedBatch) -> LossOutput:
        return _loss(policy_logprobs.detach(), batch)

    with pytest.raises(
        ValueError, match=r"loss of micro-batch 0 \(trajectories a, bb, ccc\) carries no grad"
    ):
        _engine(save_model()).forward_backward(_batches(), detached)


def test_a_loss_function_that_raises_leaves_nothing_behind(save_model: SaveModel) -> None:
    """Its exception comes through; the part of the gradient before it is gone, and the next call
    gives what a fresh engine gives.
    """
    folder = save_model()
    batches = _batches(8)

    def raising(policy_logprobs: Float[Tensor, " tokens"], batch: PackedBatch) -> LossOutput:
        if batch is batches[1] or batch.trajectory_ids == batches[1].trajectory_ids:
            raise KeyError("reward")
        return _loss(policy_logprobs, batch)

    norms = []
    for fails_first in (True, False):
        engine = _engine(folder)
        if fails_first:
            with pytest.raises(KeyError, match="reward"):
                engine.forward_backward(batches, raising)
            with pytest.raises(RuntimeError, match=r"no gradient"):
                engine.optim_step()
        engine.forward_backward(batches, _loss)
        norms.append(engine.optim_step().grad_norm)
    assert norms[0] == norms[1]


def test_metrics_are_added_up(save_model: SaveModel) -> None:
    """Shares of 3 micro-batches add up; other names in one of them are an error."""
    engine = _engine(save_model())

    def counted(policy_logprobs: Float[Tensor, " tokens"], batch: PackedBatch) -> LossOutput:
        share = batch.loss_mask.sum() / 12
        return LossOutput(loss=_loss(policy_logprobs, batch).loss, metrics={"tokens": share})

    assert engine.forward_backward(_batches(8), counted)["tokens"] == pytest.approx(1.0)

    def changing(policy_logprobs: Float[Tensor, " tokens"], batch: PackedBatch) -> LossOutput:
        name = batch.trajectory_ids[0]
        return LossOutput(loss=_loss(policy_logprobs, batch).loss, metrics={name: torch.ones(())})

    with pytest.raises(ValueError, match=r"micro-batch 1 .* has the metrics"):
        engine.forward_backward(_batches(8), changing)


def test_clipping_scales_the_step_not_the_reported_norm(save_model: SaveModel) -> None:
    """`grad_norm` is that before clipping, whatever the limit."""
    norms = []
    for limit in (None, 1e-3):
        engine = _engine(save_model(), optim=OptimConfig(learning_rate=0.01, max_grad_norm=limit))
        engine.forward_backward(_batches(), _loss)
        norms.append(engine.optim_step().grad_norm)
    assert norms[0] == norms[1] > 1e-3


def test_activation_checkpointing_gives_the_same_step(save_model: SaveModel) -> None:
    """Recomputing under FSDP2 changes no bit of the weights after a step."""
    folder = save_model()
    exported = []
    for checkpointing in ("none", "full", "selective"):
        engine = _engine(folder, activation_checkpointing=checkpointing)
        engine.forward_backward(_batches(), _loss)
        engine.optim_step()
        exported.append(_weights(engine))
    for others in exported[1:]:
        assert all(torch.equal(exported[0][name], others[name]) for name in exported[0])


def test_entropies_come_with_the_logprobs(save_model: SaveModel) -> None:
    """Entropy of plain transformers' softmax at the temperature, 0 outside the mask; same pass."""
    folder = save_model("llama")
    [batch] = _batches()
    engine = _engine(folder, temperature=0.7)
    [got] = engine.token_statistics([batch])
    [logprobs] = engine.logprobs([batch])
    assert torch.equal(got.logprobs, logprobs)
    plain: Any = AutoModelForCausalLM.from_pretrained(folder)
    for begin, end in pairwise(batch.cu_seqlens.tolist()):
        with torch.no_grad():
            logits = plain(batch.token_ids[None, begin:end]).logits[0, :-1] / 0.7
        entropies = torch.distributions.Categorical(logits=logits).entropy()
        expected = entropies * batch.loss_mask[begin + 1 : end]
        torch.testing.assert_close(got.entropies[begin + 1 : end], expected, atol=1e-5, rtol=0.0)
        assert got.entropies[begin] == 0.0


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"compile_blocks": True, "compute_dtype": "bfloat16"}, r"set compile_blocks = False"),
        ({"offload": "parameters"}, r"in host memory already: set offload = 'none'"),
    ],
)
def test_settings_without_effect_on_a_cpu_are_refused(
    save_model: SaveModel, changes: dict[str, object], text: str
) -> None:
    """Compiled blocks and offloading are for GPUs; on a CPU they say so."""
    with pytest.raises(ValueError, match=rf"has no effect on a CPU device.*{text}"):
        _engine(save_model(), **changes)


def test_what_runs_is_compared_with_what_was_asked(
    save_model: SaveModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attention that does not run, for one, is found at construction, both sides named."""
    monkeypatch.setattr("engine_fsdp.model.ATTENTION_NAME", "sdpa")
    with pytest.raises(
        RuntimeError, match=r"calls of packed attention: asked for 2, what runs has 0"
    ):
        _engine(save_model())


def test_a_world_that_does_not_fit_is_refused(save_model: SaveModel) -> None:
    """Two ranks configured, one running: the message has both numbers."""
    with pytest.raises(ValueError, match=r"needs 2 ranks .* got a world of 1"):
        _engine(save_model(), parallel=ParallelState(dp_size=2))


def test_devices_and_groups_that_are_not_there_are_refused(save_model: SaveModel) -> None:
    """A device that is not there, one without packed attention, and no process group, in words."""
    config = FsdpConfig(model_path=str(save_model()), optim=OptimConfig(learning_rate=0.01))
    beyond = torch.device("cuda", torch.cuda.device_count())
    with pytest.raises(ValueError, match=rf"got {beyond}, but torch .* sees \d+ such devices"):
        FsdpEngine(config, device=beyond)
    with pytest.raises(ValueError, match=r"expected a CPU or a CUDA .* device, got meta"):
        FsdpEngine(config, device=torch.device("meta"))
    dist.destroy_process_group()
    with pytest.raises(RuntimeError, match=r"process_group\.init_process_group\(\) first"):
        FsdpEngine(config, device=CPU)
    init_process_group()  # for the fixture to end
