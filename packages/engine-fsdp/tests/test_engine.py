"""The engine in one process."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import make_batches, make_engine, make_trajectory, plain_loss, weights_of
from jaxtyping import Float
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from engine_fsdp import OptimConfig
from rl_contracts.packing import pack
from rl_contracts.train import Checkpointable, LossOutput, PackedBatch, TrainEngine

SaveModel = Callable[..., Path]

pytestmark = pytest.mark.usefixtures("process_group")


def test_it_is_a_train_engine(save_model: SaveModel) -> None:
    """The class fits both Protocols, for the type checker, at version 0 and with no checkpoint."""
    engine = make_engine(save_model())
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
    exported = weights_of(make_engine(folder, compute_dtype=name))
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
    engine = make_engine(source, export_dtype="bfloat16")
    engine.forward_backward(make_batches(), plain_loss)
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
    exported = weights_of(engine)
    assert saved.keys() == exported.keys() == load_file(source / "model.safetensors").keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in exported.items())


def test_exported_tensors_are_the_callers_own(save_model: SaveModel) -> None:
    """Overwriting what was exported changes no weight, and a step changes nothing exported."""
    engine = make_engine(save_model())
    first = weights_of(engine)
    copies = {name: tensor.clone() for name, tensor in first.items()}
    engine.forward_backward(make_batches(), plain_loss)
    engine.optim_step()
    assert all(torch.equal(first[name], copies[name]) for name in first)
    stepped = weights_of(engine)
    for tensor in weights_of(engine).values():
        tensor.zero_()
    assert all(torch.equal(stepped[name], tensor) for name, tensor in weights_of(engine).items())


def test_logprobs_equal_plain_transformers(save_model: SaveModel) -> None:
    """float32 logprobs of masked-in tokens to 1e-5, at the temperature; 0 for prompt tokens."""
    folder = save_model("llama")
    [batch] = make_batches()
    [got] = make_engine(folder, temperature=0.7).logprobs([batch])
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
        engine = make_engine(folder)
        batches = make_batches(100 if split == "one" else 8)
        assert len(batches) == (1 if split == "one" else 3)
        calls = [[batch] for batch in batches] if split == "calls" else [batches]
        loss = sum(engine.forward_backward(call, plain_loss)["loss"] for call in calls)
        results.append((loss, engine.optim_step().grad_norm))
    assert results[1] == pytest.approx(results[0], rel=1e-5)
    assert results[2] == pytest.approx(results[0], rel=1e-5)


def test_forward_backward_moves_no_weight_and_a_step_raises_the_version(
    save_model: SaveModel,
) -> None:
    """Weights change in `optim_step` alone, which counts; the gradient is used once."""
    engine = make_engine(save_model())
    before = weights_of(engine)
    engine.forward_backward(make_batches(), plain_loss)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights_of(engine).items())
    assert engine.policy_version == 0
    assert engine.optim_step().policy_version == 1
    assert engine.policy_version == 1
    assert not torch.equal(before["model.norm.weight"], weights_of(engine)["model.norm.weight"])
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
    engine = make_engine(save_model("llama"), optim=optim)
    before = weights_of(engine)["model.norm.weight"]
    assert engine.learning_rate == pytest.approx(0.01)
    engine.forward_backward(make_batches(), plain_loss)
    engine.optim_step()
    moved = weights_of(engine)["model.norm.weight"] - before * (1 - 0.01 * 0.1)
    torch.testing.assert_close(moved.abs(), torch.full_like(moved, 0.01), atol=1e-6, rtol=1e-3)
    assert engine.learning_rate == pytest.approx(0.02)


def test_training_raises_the_logprob_of_good_tokens(save_model: SaveModel) -> None:
    """Ten steps on one row with advantage 1 raise its mean logprob, seen by `logprobs` at once."""
    engine = make_engine(save_model())
    [[batch]] = pack([make_trajectory("a", prompt=2, sampled=6)], [1.0], max_tokens=10)
    seen = []
    for _ in range(10):
        seen.append(engine.logprobs([batch])[0].sum().item())
        engine.forward_backward([batch], plain_loss)
        engine.optim_step()
    assert seen == sorted(seen)
    assert seen[-1] > seen[0] + 1.0


def test_bfloat16_computes_near_float32(save_model: SaveModel) -> None:
    """bfloat16 weights give logprobs within 0.1 nats of float32; masters are float32."""
    folder = save_model()
    [exact] = make_engine(folder).logprobs(make_batches())
    engine = make_engine(folder, compute_dtype="bfloat16", export_dtype="float32")
    [rounded] = engine.logprobs(make_batches())
    assert rounded.dtype == torch.float32
    assert not torch.equal(rounded, exact)
    torch.testing.assert_close(rounded, exact, atol=0.1, rtol=0.0)
    assert {tensor.dtype for tensor in weights_of(engine).values()} == {torch.float32}


def test_a_step_below_bfloat16_resolution_is_kept(save_model: SaveModel) -> None:
    """Many steps too small for bfloat16 add up in the float32 masters."""
    optim = OptimConfig(learning_rate=1e-4, weight_decay=0.0)
    engine = make_engine(
        save_model(), optim=optim, compute_dtype="bfloat16", export_dtype="float32"
    )
    before = weights_of(engine)["model.norm.weight"]
    engine.forward_backward(make_batches(), plain_loss)
    engine.optim_step()
    moved = weights_of(engine)["model.norm.weight"] - before
    assert 0.0 < moved.abs().max().item() < 2e-4


def test_nothing_to_learn_from_gives_a_zero_gradient(save_model: SaveModel) -> None:
    """A micro-batch outside the loss mask: loss 0, gradient 0, no weight moves (A11).

    The second loss does not even touch the logprobs.
    """
    engine = make_engine(save_model(), optim=OptimConfig(learning_rate=0.01, weight_decay=0.0))
    batches = [
        replace(batch, loss_mask=torch.zeros_like(batch.loss_mask)) for batch in make_batches()
    ]
    before = weights_of(engine)

    def constant(_: Float[Tensor, " tokens"], __: PackedBatch) -> LossOutput:
        return LossOutput(loss=torch.zeros(()), metrics={})

    for loss_fn in (plain_loss, constant):
        assert engine.forward_backward(batches, loss_fn) == {"loss": 0.0}
        assert engine.optim_step().grad_norm == 0.0
    assert engine.logprobs(batches)[0].eq(0.0).all()
    assert all(torch.equal(before[name], tensor) for name, tensor in weights_of(engine).items())


def test_metrics_are_added_up(save_model: SaveModel) -> None:
    """Shares of 3 micro-batches add up; other names in one of them are an error."""
    engine = make_engine(save_model())

    def counted(policy_logprobs: Float[Tensor, " tokens"], batch: PackedBatch) -> LossOutput:
        share = batch.loss_mask.sum() / 12
        return LossOutput(loss=plain_loss(policy_logprobs, batch).loss, metrics={"tokens": share})

    assert engine.forward_backward(make_batches(8), counted)["tokens"] == pytest.approx(1.0)

    def changing(policy_logprobs: Float[Tensor, " tokens"], batch: PackedBatch) -> LossOutput:
        name = batch.trajectory_ids[0]
        return LossOutput(
            loss=plain_loss(policy_logprobs, batch).loss, metrics={name: torch.ones(())}
        )

    with pytest.raises(ValueError, match=r"micro-batch 1 .* has the metrics"):
        engine.forward_backward(make_batches(8), changing)


def test_clipping_scales_the_step_not_the_reported_norm(save_model: SaveModel) -> None:
    """`grad_norm` is that before clipping, whatever the limit."""
    norms = []
    for limit in (None, 1e-3):
        engine = make_engine(
            save_model(), optim=OptimConfig(learning_rate=0.01, max_grad_norm=limit)
        )
        engine.forward_backward(make_batches(), plain_loss)
        norms.append(engine.optim_step().grad_norm)
    assert norms[0] == norms[1] > 1e-3


def test_activation_checkpointing_gives_the_same_step(save_model: SaveModel) -> None:
    """Recomputing under FSDP2 changes no bit of the weights after a step."""
    folder = save_model()
    exported = []
    for checkpointing in ("none", "full", "selective"):
        engine = make_engine(folder, activation_checkpointing=checkpointing)
        engine.forward_backward(make_batches(), plain_loss)
        engine.optim_step()
        exported.append(weights_of(engine))
    for others in exported[1:]:
        assert all(torch.equal(exported[0][name], others[name]) for name in exported[0])


def test_entropies_come_with_the_logprobs(save_model: SaveModel) -> None:
    """Entropy of plain transformers' softmax at the temperature, 0 outside the mask; same pass."""
    folder = save_model("llama")
    [batch] = make_batches()
    engine = make_engine(folder, temperature=0.7)
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
