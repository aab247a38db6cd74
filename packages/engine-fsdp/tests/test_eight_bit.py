"""AdamW with moments in 8 bits: torchao's against the rounding written down, parts, and resuming.

torchao's step runs uncompiled here, but for one test: compiling takes seconds for each shape.
"""

import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from jaxtyping import Float
from safetensors.torch import load_file
from torch import Tensor

from engine_fsdp import FsdpConfig, FsdpEngine, LoraConfig, MuonConfig, OptimConfig, plan
from engine_fsdp.eight_bit import EightBitAdamW
from parallel_state.parking import Parked
from rl_contracts.packing import pack
from rl_contracts.rollout import PolicyVersion, Trajectory
from rl_contracts.train import LossOutput, PackedBatch

SaveModel = Callable[..., Path]

OPTIM = OptimConfig(learning_rate=0.01, weight_decay=0.1, betas=(0.9, 0.95), max_grad_norm=None)
SIZES = {"hidden_size": 256, "intermediate_size": 40, "num_hidden_layers": 1}
"""q, k, v, gate and up have rows of 256; o has 32 and down 40."""

IN_EIGHT_BITS = {
    f"model.layers.0.{name}.weight"
    for name in (*(f"self_attn.{which}_proj" for which in "qkv"), "mlp.gate_proj", "mlp.up_proj")
}

pytestmark = pytest.mark.filterwarnings("ignore")  # torchao's own, at its import


@pytest.fixture(autouse=True)
def uncompiled() -> Iterator[None]:
    """Skip without the extra."""
    pytest.importorskip("torchao")
    with torch.compiler.set_stance("force_eager"):
        yield


def _matrix(seed: int, rows: int = 6) -> Tensor:
    """Gradients of all sizes, as a network has them."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randn(rows, 512, generator=generator).exp()
    return torch.randn(rows, 512, generator=generator) * sizes


def _walk(parameters: Mapping[str, Tensor], *, steps: range, rows: slice) -> EightBitAdamW:
    optimizer = EightBitAdamW(parameters, OPTIM)
    for step in steps:
        for parameter in parameters.values():
            parameter.grad = _matrix(step)[rows]
        optimizer.step(rate=0.01 * (step + 1))
    return optimizer


def _rounded(moment: Tensor, levels: Tensor) -> Tensor:
    """Each 256 divided by the largest of them, rounded to the nearest level, and multiplied."""
    scale = moment.view(-1, 256).abs().amax(1, keepdim=True)
    distances = ((moment.view(-1, 256) / scale)[..., None] - levels).abs()
    return (levels[distances.argmin(-1)] * scale).view(moment.shape)


def _in_words(start: Tensor, steps: int, *, rounds: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Loshchilov and Hutter 2019 (arXiv:1711.05101), algorithm 2, rounding what is kept."""
    maps = importlib.import_module("torchao.optim.quant_utils").create_dynamic_map
    weight, first, second = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    for step in range(steps):
        rate, gradient = 0.01 * (step + 1), _matrix(step)
        first = 0.9 * first + 0.1 * gradient
        second = 0.95 * second + 0.05 * gradient.square()
        mean, square = first / (1 - 0.9 ** (step + 1)), second / (1 - 0.95 ** (step + 1))
        weight = weight - rate * 0.1 * weight - rate * mean / (square.sqrt() + OPTIM.eps)
        if rounds:
            first = _rounded(first, torch.tensor(maps(signed=True)))
            # the lowest level is 0, which is left to elements that have had no gradient
            second = _rounded(second, torch.tensor(maps(signed=False))[1:])
    return weight, first, second


def test_it_is_adamw_whose_moments_are_rounded() -> None:
    """Six steps at six rates: weights to 1e-5 of those with rounding written down, moments but for
    one in a thousand elements that lie between two levels; the mean of the differences from AdamW
    without rounding is below 3% of the mean distance walked.
    """
    start = _matrix(99)
    weight = start.clone().requires_grad_()
    optimizer = _walk({"w": weight}, steps=range(6), rows=slice(None))
    expected, first, second = _in_words(start, 6, rounds=True)
    differences = (weight.detach() - expected).abs()
    assert (differences > 1e-5).float().mean() < 1e-3
    state = optimizer.state("w")
    for moment, wanted, signed in (("exp_avg", first, True), ("exp_avg_sq", second, False)):
        maps = importlib.import_module("torchao.optim.quant_utils").create_dynamic_map
        levels = torch.tensor(maps(signed=signed))[state[f"{moment}_codes"].int()]
        got = levels.view(6, 2, 256) * state[f"{moment}_scales"][..., None]
        assert torch.isclose(got.view(6, 512), wanted, rtol=1e-5).float().mean() > 0.999
    assert state["step"].tolist() == [6.0]
    exact = _in_words(start, 6, rounds=False)[0]
    walked = (exact - start).abs().mean()
    assert 0.002 * walked < (weight.detach() - exact).abs().mean() < 0.03 * walked


def test_an_element_without_a_gradient_does_not_leap() -> None:
    """Beside a gradient of 1, one of 1e-6 and then of 0: the first moment over eps would be 47
    times the rate, and with exact moments it is less than the rate.
    """
    weight = torch.zeros(1, 256).requires_grad_()
    optimizer = EightBitAdamW({"w": weight}, OPTIM)
    for small in (1e-6, 0.0):
        weight.grad = torch.ones(1, 256)
        weight.grad[0, 0] = small
        before = weight.detach().clone()
        optimizer.step(rate=0.01)
    assert 0.0 < (weight - before).abs()[0, 0].item() < 0.01


@pytest.mark.parametrize("size", [1, 2, 5])
def test_parts_of_rows_are_the_whole(size: int) -> None:
    """The first rows alone and the others alone have the whole's weights, codes and scales, bit for
    bit; also where one of them is smaller than what torchao would keep in float32.
    """
    start = _matrix(99)
    whole = start.clone().requires_grad_()
    expected = _walk({"w": whole}, steps=range(3), rows=slice(None)).state("w")
    for rows in (slice(size), slice(size, 6)):
        part = start[rows].clone().requires_grad_()
        got = _walk({"w": part}, steps=range(3), rows=rows).state("w")
        assert torch.equal(part, whole[rows])
        for name in ("exp_avg_codes", "exp_avg_scales", "exp_avg_sq_codes", "exp_avg_sq_scales"):
            assert torch.equal(got[name], expected[name][rows]), name


def test_a_rank_without_rows_takes_part_in_nothing() -> None:
    """Its state has the names and widths of all others'."""
    empty = torch.zeros(0, 512).requires_grad_()
    optimizer = _walk({"w": empty}, steps=range(1), rows=slice(0))
    shapes = {name: tuple(tensor.shape) for name, tensor in optimizer.state("w").items()}
    assert shapes == {
        "step": (1,),
        **{f"{moment}_codes": (0, 512) for moment in ("exp_avg", "exp_avg_sq")},
        **{f"{moment}_scales": (0, 2) for moment in ("exp_avg", "exp_avg_sq")},
    }


def test_moments_may_be_away_between_steps() -> None:
    """Their memory is given away and comes back, as for a sampler: the next step is the same."""
    stayed, went = (_matrix(99).requires_grad_() for _ in range(2))
    optimizers = [
        _walk({"w": weight}, steps=range(2), rows=slice(None)) for weight in (stayed, went)
    ]
    held = list(optimizers[1].held())
    parked = Parked(held)
    assert sum(tensor.untyped_storage().nbytes() for tensor in held) == 0
    assert parked.nbytes == 2 * (6 * 512 + 4 * 6 * 2)
    parked.restore()
    for optimizer, weight in zip(optimizers, (stayed, went), strict=True):
        weight.grad = _matrix(2)
        optimizer.step(rate=0.03)
    assert torch.equal(stayed, went)


@pytest.mark.slow
def test_compiled_it_is_the_same() -> None:
    """torchao compiles its step where nobody forbids it."""
    uncompiled, compiled = (_matrix(99).requires_grad_() for _ in range(2))
    _walk({"w": uncompiled}, steps=range(3), rows=slice(None))
    torch.compiler.reset()
    with torch.compiler.set_stance("default"):
        _walk({"w": compiled}, steps=range(3), rows=slice(None))
    assert ((compiled - uncompiled).abs() > 1e-5).float().mean() < 1e-3


def _batches() -> list[PackedBatch]:
    rows = [
        Trajectory(
            trajectory_id=str(index),
            group_id="group",
            token_ids=tuple((11 * index + 7 * place) % 37 for place in range(8 + index)),
            loss_mask=tuple(place > 0 for place in range(8 + index)),
            rollout_logprobs=(0.0,) * (8 + index),
            oldest_version=PolicyVersion(0),
            newest_version=PolicyVersion(0),
        )
        for index in range(3)
    ]
    return pack(rows, [1.0, -1.0, 2.0], max_tokens=20)[0]


def _loss(policy_logprobs: Float[Tensor, " tokens"], batch: PackedBatch) -> LossOutput:
    per_token = batch.advantages.repeat_interleave(batch.cu_seqlens.diff())
    return LossOutput(loss=-(policy_logprobs * per_token).sum() / 24, metrics={})


def _config(folder: Path, **changes: Any) -> FsdpConfig:  # noqa: ANN401
    settings: dict[str, Any] = {"compute_dtype": "float32", "eight_bit_moments": True, **changes}
    return FsdpConfig(model_path=str(folder), optim=OPTIM, **settings)


def _engine(config: FsdpConfig) -> FsdpEngine:
    return FsdpEngine(config, device=torch.device("cpu"))


def _steps(engine: FsdpEngine, number: int) -> None:
    for _ in range(number):
        engine.forward_backward(_batches(), _loss)
        engine.optim_step()


@pytest.mark.usefixtures("process_group")
def test_resuming_is_not_having_stopped(save_model: SaveModel, tmp_path: Path) -> None:
    """Two steps, a checkpoint, two steps: as in an engine that loads it, bit for bit. The file has
    codes of the matrices with rows of 256 elements, and float32 moments of the rest.
    """
    config = _config(save_model("qwen3", **SIZES))
    engine = _engine(config)
    _steps(engine, 2)
    engine.save_checkpoint(tmp_path / "checkpoint")
    _steps(engine, 2)
    resumed = _engine(config)
    resumed.load_checkpoint(tmp_path / "checkpoint")
    _steps(resumed, 2)
    expected, got = engine._optimizer.state(), resumed._optimizer.state()
    expected |= dict(engine.export_weights())
    got |= dict(resumed.export_weights())
    assert expected.keys() == got.keys()
    assert [name for name in expected if not torch.equal(expected[name], got[name])] == []
    stored = load_file(tmp_path / "checkpoint" / "rank-00000.safetensors")
    for parameter in engine._parameters:
        kind = {torch.uint8} if parameter in IN_EIGHT_BITS else {torch.float32}
        found = [f"optim.exp_avg{end}.{parameter}" for end in ("", "_codes", "_sq", "_sq_codes")]
        assert {stored[name].dtype for name in found if name in stored} == kind, parameter


@pytest.mark.usefixtures("process_group")
def test_it_trains_as_float32_moments_do(save_model: SaveModel) -> None:
    """Five steps: the 8-bit weights are within 5% of the distance that float32 moments walk, and
    the objective rises by what it rises with those, to 2%.
    """
    folder = save_model("qwen3", **SIZES, std=0.05)
    before = dict(_engine(_config(folder)).export_weights())
    after, gains = [], []
    for small in (False, True):
        engine = _engine(_config(folder, eight_bit_moments=small))
        first = sum(float(_loss(*pair).loss) for pair in _scored(engine))
        _steps(engine, 5)
        gains.append(first - sum(float(_loss(*pair).loss) for pair in _scored(engine)))
        after.append(dict(engine.export_weights()))
    for name in IN_EIGHT_BITS:
        walked = (after[0][name] - before[name]).abs().mean()
        assert 0 < (after[1][name] - after[0][name]).abs().mean() < 0.05 * walked, name
    assert gains[1] == pytest.approx(gains[0], rel=0.02)
    assert gains[0] > 0


@pytest.mark.slow
def test_training_does_not_depend_on_the_number_of_ranks(
    save_model: SaveModel, tmp_path: Path
) -> None:
    """What two ranks saved, one loads to the bit; after three steps weights are those of one rank.

    Rows do not divide over the ranks (41 of gate and up), and some parts (k, v) are smaller than
    what torchao would keep in 8 bits.
    """
    folder = save_model("qwen3", **{**SIZES, "intermediate_size": 41}, std=0.05)
    worker = Path(__file__).with_name("eight_bit_worker.py")
    command = [sys.executable, str(worker), "--model", str(folder), "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    on_two, on_one, loaded = (
        load_file(tmp_path / f"{name}.safetensors") for name in ("on-2", "on-1", "loaded")
    )
    assert on_two.keys() == on_one.keys() == loaded.keys()
    state = [name for name in on_two if name.startswith("optim.")]
    assert on_two["optim.exp_avg_scales.model.layers.0.mlp.up_proj.weight"].shape == (41, 1)
    assert [name for name in state if not torch.equal(on_two[name], loaded[name])] == []
    for name in (name for name in on_two if name.startswith("weight.")):
        torch.testing.assert_close(on_two[name], loaded[name], atol=1e-4, rtol=1e-4, msg=name)
        # a moment between two levels of the rounding may fall to another one
        differ = (on_two[name] - on_one[name]).abs() > 1e-4
        assert differ.float().mean() < 0.01, name


def _scored(engine: FsdpEngine) -> list[tuple[Tensor, PackedBatch]]:
    return list(zip(engine.logprobs(_batches()), _batches(), strict=True))


def test_the_plan_knows(save_model: SaveModel) -> None:
    """Two moments of a byte and 4/256 for each weight in 8 bits, by hand."""
    folder = save_model("qwen3", **SIZES)
    config = _config(folder, compute_dtype="bfloat16")
    large = plan(_config(folder, compute_dtype="bfloat16", eight_bit_moments=False), tokens=64)
    num_small = 256 * (32 + 16 + 16 + 40 + 40)
    assert large.moments - plan(config, tokens=64).moments == num_small * 8 - num_small * 65 // 32


@pytest.mark.usefixtures("process_group")
def test_rows_that_do_not_divide_are_refused(save_model: SaveModel) -> None:
    """A setting that changes nothing would be inert."""
    with pytest.raises(ValueError, match=r"multiples of the 256 elements .* got rows of 32, 48;"):
        _engine(_config(save_model("qwen3")))


@pytest.mark.usefixtures("process_group")
def test_without_torchao_the_extra_is_named(
    save_model: SaveModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At construction, with the line that installs it."""
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    config = _config(save_model("qwen3", **SIZES))
    with pytest.raises(ImportError, match=r"pip install engine-fsdp\[eight-bit\]"):
        _engine(config)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"muon": MuonConfig()}, r"and muon: it keeps one moment"),
        ({"lora": LoraConfig()}, r"and lora: the adapters' moments are few"),
        ({"offload": "parameters"}, r"and offload = 'parameters': the moments lie in the host's"),
        ({"deterministic": True}, r"and deterministic: torch.compile chooses"),
    ],
)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], text: str) -> None:
    """With both settings named."""
    with pytest.raises(ValueError, match=rf"eight_bit_moments = True {text}.*moments off"):
        _config(Path("model"), **changes)
