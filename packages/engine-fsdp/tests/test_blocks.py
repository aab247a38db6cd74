"""Blocks as configured: compiled in one graph, recomputed, or both."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from engine_fsdp.attention_varlen import PackedVarlen
from engine_fsdp.block_inputs import InputsOnHost
from engine_fsdp.model import PackedCausalLM, load_model, pack_rows

SaveModel = Callable[..., Path]

LENGTHS = ((5, 9, 3), (8, 2), (4, 6, 7, 11))


def _masked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cu_seqlens: Tensor,
    max_length: int,  # noqa: ARG001  # a kernel's launch is sized by it
    scaling: float | None,
) -> Tensor:
    """What a GPU's kernel computes, for CPUs: all pairs of tokens, and a mask."""
    places = torch.arange(query.shape[0])
    sequence = torch.bucketize(places, cu_seqlens[1:], right=True)
    mask = (sequence[:, None] == sequence) & (places[:, None] >= places)
    query, key, value = (part.transpose(0, 1)[None] for part in (query, key, value))
    attended = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True
    )
    return attended[0].transpose(0, 1)


def _run(model: PackedCausalLM, lengths: tuple[int, ...]) -> list[Tensor]:
    """Log-probabilities and gradients with the layout that GPUs have."""
    rows = [torch.arange(length) * 7 % 37 for length in lengths]
    token_ids, positions, predicting, targets, _ = pack_rows(rows)
    packed = PackedVarlen(
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int(),
        max_length=max(lengths),
        kernel=_masked,
    )
    model.zero_grad()
    logprobs = model(token_ids, positions, predicting, targets, packed).logprobs
    logprobs.tanh().sum().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [logprobs.detach(), *(gradient.clone() for gradient in gradients)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize(("kind", "checkpointing"), [("qwen3", "none"), ("llama", "selective")])
def test_one_graph_serves_all_blocks_and_lengths(
    save_model: SaveModel, monkeypatch: pytest.MonkeyPatch, kind: str, checkpointing: str
) -> None:
    """Compiled blocks have the gradient of plain ones, and other lengths need no other graph."""
    from torch._dynamo.callback import callback_handler  # noqa: PLC0415  # seconds to import

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    folder = save_model(kind, num_hidden_layers=3)
    plain, compiled = load_model(folder, temperature=1.0), load_model(folder, temperature=1.0)
    compiled.wrap_blocks(checkpointing=checkpointing, compiled=True)  # type: ignore[arg-type]
    graphs = 0

    def counted(*_: object) -> None:
        nonlocal graphs
        graphs += 1

    torch.compiler.reset()
    callback_handler.register_start_callback(counted)
    try:
        for lengths in LENGTHS:
            for got, expected in zip(_run(compiled, lengths), _run(plain, lengths), strict=True):
                torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    finally:
        callback_handler.remove_start_callback(counted)
    assert graphs == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_compiled_blocks_leave_their_inputs_too(
    save_model: SaveModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what one graph keeps, the input alone goes; gradients are those without, to the bit."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    folder = save_model("qwen3", num_hidden_layers=3)
    plain, offloaded = load_model(folder, temperature=1.0), load_model(folder, temperature=1.0)
    torch.compiler.reset()
    plain.wrap_blocks(checkpointing="full", compiled=True)
    inputs = InputsOnHost()
    offloaded.wrap_blocks(checkpointing="full", compiled=True, inputs=inputs)
    for lengths in LENGTHS:
        got, expected = _run(offloaded, lengths), _run(plain, lengths)
        assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))
        assert [buffer.nbytes >= sum(lengths) * 32 * 4 for buffer in inputs._buffers] == [True] * 3
    assert sum(LENGTHS[-1]) * 32 * 4 == inputs._buffers[0].nbytes


def test_blocks_that_would_run_uncompiled_are_an_error(
    save_model: SaveModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With torch.compile switched off from outside, what is configured would not run."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    model = load_model(save_model("qwen3"), temperature=1.0)
    model.wrap_blocks(checkpointing="none", compiled=True)
    with pytest.raises(RuntimeError, match=r"compile_blocks = True, but torch.compile is switched"):
        _run(model, LENGTHS[0])


@pytest.mark.parametrize(("checkpointing", "share"), [("full", 0.3), ("selective", 0.75)])
def test_recomputing_keeps_less(save_model: SaveModel, checkpointing: str, share: float) -> None:
    """Bytes kept between forward and backward, against those without recomputation."""

    def kept(setting: str) -> int:
        model = load_model(save_model("qwen3", num_hidden_layers=6), temperature=1.0)
        model.wrap_blocks(checkpointing=setting, compiled=False)  # type: ignore[arg-type]
        seen: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, torch.nn.Parameter):
                seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            logprobs = model(*pack_rows([torch.arange(64) % 37])).logprobs
        assert logprobs.requires_grad
        return sum(seen.values())

    assert kept(checkpointing) < share * kept("none")


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ("is_causal=False, return_aux=None, scale=None", {"is_causal": True, "scale": 0.5}),
        ("is_causal=False, return_aux=None", {"is_causal": True}),
        ("*, scale=None, window_size=(-1, -1)", {"window_size": (-1, 0)}),
        (
            "*, scale=None, window_size=(-1, -1), enable_gqa=False",
            {"window_size": (-1, 0), "enable_gqa": True},
        ),
    ],
    ids=["with scale", "torch 2.10", "torch 2.11", "torch 2.13"],
)
def test_the_kernel_is_told_what_it_wants_to_hear(
    monkeypatch: pytest.MonkeyPatch, known: str, expected: dict[str, object]
) -> None:
    """Causal attention with grouped heads, in the words of each version of torch."""
    from torch.nn.attention import varlen  # noqa: PLC0415  # seconds to import

    from engine_fsdp.attention_varlen import flash_kernel  # noqa: PLC0415

    heard: dict[str, object] = {}
    namespace: dict[str, Callable[..., Tensor]] = {}
    code = f"def fake(query, key, value, cu_q, cu_k, max_q, max_k, {known}): return note(locals())"
    names = {"note": lambda given: heard.update(given) or given["query"]}
    exec(code, names, namespace)  # noqa: S102  # three signatures, written above
    monkeypatch.setattr(varlen, "varlen_attn", namespace["fake"])
    flash_kernel.cache_clear()
    states = torch.zeros(3, 2, 8)
    starts = torch.tensor([0, 1, 3], dtype=torch.int32)
    try:
        scaling = 0.5 if "scale" in known else 8**-0.5
        attend = partial(flash_kernel(), states, states, states, cu_seqlens=starts, max_length=2)
        attend(scaling=scaling)
        if "scale" not in known:
            with pytest.raises(ValueError, match=r"takes no scale, and the model asks for 0.5"):
                attend(scaling=0.5)
    finally:
        flash_kernel.cache_clear()
    assert {name: heard[name] for name in expected} == expected
    assert (heard["max_q"], heard["max_k"]) == (2, 2)
    assert heard.get("scale") == (0.5 if "scale" in known else None)
    assert heard["cu_q"] is starts
    assert heard["cu_k"] is starts
