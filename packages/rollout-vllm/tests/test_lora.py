"""Adapters in the config, and what an update of one must be; no vLLM runs."""

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rl_contracts.config import load_config
from rollout_vllm import Lora, Speculation, StartError, VllmConfig, adapter_weights
from rollout_vllm.copy_plan import Piece
from rollout_vllm.headers import TensorHeader
from rollout_vllm.lora import _ROOMS, check_is_adapter, split_name
from rollout_vllm.model_checks import check_model
from rollout_vllm.readback import check_settings
from rollout_vllm.starting import model_tensors
from rollout_vllm.whole_tensors import WholeTensors

LORA = Lora(rank=3, alpha=6.0, target_modules=("q_proj", "down_proj"))
MODEL = {
    "model.embed_tokens.weight": TensorHeader("F32", (96, 8)),
    "model.layers.0.self_attn.q_proj.weight": TensorHeader("F32", (16, 8)),
    "model.layers.0.self_attn.q_proj.bias": TensorHeader("F32", (16,)),
    "model.layers.0.self_attn.o_proj.weight": TensorHeader("F32", (8, 16)),
    "model.layers.0.mlp.down_proj.weight": TensorHeader("F32", (8, 32)),
    "model.layers.1.mlp.experts.0.up_proj.weight": TensorHeader("F32", (32, 8)),
    "model.norm.weight": TensorHeader("F32", (8,)),
    "lm_head.weight": TensorHeader("F32", (96, 8)),
}


def config(**changes: object) -> VllmConfig:
    """A small valid config with changes."""
    valid: dict[str, object] = {"model": "m", "max_model_len": 64, "kv_cache_gib": 1.0}
    return VllmConfig(**(valid | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(("rank", "room"), [(1, 1), (2, 8), (8, 8), (9, 16), (257, 320)])
def test_vllm_is_given_room_for_the_rank(rank: int, room: int) -> None:
    """One adapter, in the least of vLLM's own ranks that holds it, in the checkpoint's names."""
    lora = Lora(rank=rank, alpha=2.0, target_modules=("q_proj",))
    arguments = config(lora=lora).effective_engine_args()
    found = {name: arguments[name].value for name in arguments if "lora" in name}
    assert found == {
        "enable_lora": True,
        "max_lora_rank": room,
        "max_loras": 1,
        "lora_target_modules": ["q_proj"],
    }
    assert arguments["enable_lora"].origin == "VllmConfig.lora"
    assert arguments["max_lora_rank"].origin.startswith(
        f"derived from VllmConfig.lora.rank = {rank}"
    )
    assert not any("lora" in name for name in config().effective_engine_args())


def test_rooms_are_those_of_the_installed_vllm() -> None:
    """Another rank would be refused by it, late."""
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    source = (Path(spec.origin).parent / "config" / "lora.py").read_text(encoding="utf-8")
    assert f"MaxLoRARanks = Literal[{', '.join(map(str, _ROOMS))}]" in source


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"rank": 0}, r"'rank' must be >= 1: 0"),
        ({"rank": 513}, r"'rank' must be <= 512: 513"),
        ({"alpha": 0.0}, r"'alpha' must be > 0.0: 0.0"),
        ({"alpha": float("inf")}, r"'alpha' must be < inf: inf"),
        ({"target_modules": ()}, r"Length of 'target_modules' must be >= 1: 0"),
    ],
)
def test_bounds(settings: dict[str, object], text: str) -> None:
    """What would be no adapter, or has no room."""
    valid: dict[str, object] = {"rank": 8, "alpha": 16.0, "target_modules": ("q_proj",)}
    with pytest.raises(ValueError, match=text):
        Lora(**(valid | settings))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"device": "cuda", "dtype": "float32"},
            r"lora needs dtype bfloat16 or float16 on a GPU, .* got float32",
        ),
        (
            {"speculation": Speculation(num_speculative_tokens=3)},
            r"lora = Lora\(rank=3.* and speculation = .* have not been shown .*; leave one out",
        ),
        ({"quantization": "fp8_per_channel"}, r"lora = .* and quantization = .* have not been"),
        ({"pipeline_parallel_size": 2}, r"lora = .* and pipeline_parallel_size = 2 have not been"),
        (
            {"load_format": "dummy"},
            r"lora = .* and load_format = 'dummy': no adapter replaces the random weights",
        ),
        ({"images_per_prompt": 1}, r"lora = .* and images_per_prompt = 1 have not been shown"),
        ({"engine_args": {"max_lora_rank": 8}}, r"'max_lora_rank' .*: use VllmConfig.lora$"),
    ],
)
def test_where_nobody_has_tried_adapters_are_refused(changes: dict[str, object], text: str) -> None:
    """Each refusal names what works."""
    with pytest.raises(ValueError, match=text):
        config(lora=LORA, **changes)


def test_what_vllm_resolved_is_read_back() -> None:
    """The rank that it has room for, and every target."""
    given = config(lora=LORA).effective_engine_args()
    asked = {name: value for name, value in given.items() if "lora" in name}
    resolved: dict[str, object] = {
        "enable_lora": True,
        "max_lora_rank": 8,
        "max_loras": 1,
        "target_modules": ["q_proj", "down_proj"],
    }
    check_settings(asked, {"lora": resolved})
    with pytest.raises(StartError, match=r"enable_lora = True .* cannot be verified"):
        check_settings(asked, {"model": {}})
    with pytest.raises(
        StartError, match=r"lora_target_modules = .*the engine reports \['q_proj'\]$"
    ):
        check_settings(asked, {"lora": resolved | {"target_modules": ["q_proj"]}})


def test_names_and_shapes_follow_from_the_model() -> None:
    """A: [rank, in], B: [out, rank], under the names that peft's state dict has."""
    stem = "base_model.model.model.layers.0."
    assert {name: header.shape for name, header in LORA.tensors(MODEL).items()} == {
        f"{stem}self_attn.q_proj.lora_A.weight": (3, 8),
        f"{stem}self_attn.q_proj.lora_B.weight": (16, 3),
        f"{stem}mlp.down_proj.lora_A.weight": (3, 32),
        f"{stem}mlp.down_proj.lora_B.weight": (8, 3),
    }
    assert split_name(f"{stem}mlp.down_proj.lora_B.weight") == (
        "model.layers.0.mlp.down_proj",
        "B",
    )
    assert LORA.scaling == 2.0


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens", "norm", "up_proj", "q_projection"])
def test_a_target_that_is_no_linear_layer_of_the_blocks_is_refused(target: str) -> None:
    """The head, the embedding, a norm, experts, and what is not there."""
    lora = Lora(rank=3, alpha=6.0, target_modules=("q_proj", target))
    with pytest.raises(
        ValueError, match=rf"'{target}' names no linear .* has down_proj, o_proj, q_proj; the head"
    ):
        lora.tensors(MODEL)


def test_a_model_whose_weights_have_no_names_takes_no_adapter(tmp_path: Path) -> None:
    """Random weights of no file: which layers there are is not known before vLLM starts."""
    (tmp_path / "config.json").write_text("{}")
    dummy = config(model=str(tmp_path), load_format="dummy")
    assert model_tensors(dummy) == {}
    with pytest.raises(ValueError, match=r"expected weights as \*.safetensors in .*, found none"):
        model_tensors(config(model=str(tmp_path), lora=LORA))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, "vLLM computes experts with Triton"),
        ({"device": "cuda"}, "it has not run on GPUs"),
    ],
)
def test_experts_do_not_go_with_adapters(
    tmp_path: Path, changes: dict[str, object], why: str
) -> None:
    """Not even if their layers have none."""
    (tmp_path / "config.json").write_text('{"num_experts": 8}')
    with pytest.raises(ValueError, match=rf"lora cannot run with a mixture of experts \(8.*{why}"):
        check_model(config(model=str(tmp_path), lora=LORA, **changes))


def test_a_whole_model_is_no_adapter() -> None:
    """Nor are other names; one matrix of an adapter is looked at further."""
    expected = LORA.tensors(MODEL)
    check_is_adapter({next(iter(expected)): None}, expected)
    with pytest.raises(
        ValueError, match=r"such as 'base_model.*lora_A.weight'; got 8 other tensors \('model.embed"
    ):
        check_is_adapter(MODEL, expected)


def saved(folder: Path, **changes: object) -> Path:
    """What peft writes, with changes to its settings."""
    settings: dict[str, object] = {
        "r": 3,
        "lora_alpha": 6,
        "target_modules": ["down_proj", "q_proj"],
        "bias": "none",
        "use_rslora": False,
        "rank_pattern": {},
        "modules_to_save": None,
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings | changes))
    save_file({"x.lora_A.weight": torch.ones(3, 2)}, folder / "adapter_model.safetensors")
    return folder


def test_a_saved_adapter_is_read_as_it_is(tmp_path: Path) -> None:
    """Names and values; the order of the targets says nothing."""
    ((name, weight),) = adapter_weights(saved(tmp_path), LORA)
    assert (name, weight.tolist()) == ("x.lora_A.weight", [[1.0, 1.0]] * 3)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"lora_alpha": 12}, r"lora_alpha = 12, expected 6.0 \(VllmConfig.lora\)"),
        ({"r": 4}, r"r = 4, expected 3"),
        ({"target_modules": "all-linear"}, r"target_modules = 'all-linear', expected \['down_p"),
        ({"use_rslora": True}, r"use_rslora = True, which is not applied here"),
        ({"use_dora": True, "bias": "all"}, r"bias = 'all', .*; use_dora = True, which is not"),
        ({"rank_pattern": {"q_proj": 4}}, r"rank_pattern = \{'q_proj': 4\}, which is not applied"),
        ({"init_lora_weights": "pissa"}, r"init_lora_weights = 'pissa', which is not applied"),
        ({"alora_invocation_tokens": [1]}, r"alora_invocation_tokens = \[1\], which is not appl"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save = \['lm_head'\], which is not appl"),
    ],
)
def test_a_saved_adapter_of_another_kind_is_refused(
    tmp_path: Path, changes: Mapping[str, object], text: str
) -> None:
    """The matrices alone would not show it."""
    with pytest.raises(ValueError, match=text):
        adapter_weights(saved(tmp_path, **changes), LORA)


def test_adapters_are_read_from_a_file(tmp_path: Path) -> None:
    """The strict loader builds the nested table."""
    file = tmp_path / "sampler.toml"
    lines = 'model = "m"\nmax_model_len = 64\nkv_cache_gib = 1.0\n[lora]\nrank = 3\nalpha = 6.0\n'
    file.write_text(lines + 'target_modules = ["q_proj", "down_proj"]\n')
    assert load_config(VllmConfig, file=file).value.lora == LORA


def test_pieces_become_whole_tensors_of_their_own_memory() -> None:
    """In rows, all at once, or without rows."""
    whole, rows = WholeTensors(), torch.arange(6.0).reshape(3, 2)
    assert whole.add(Piece("a", rows[:1], 0, 3)) is None
    joined = whole.add(Piece("a", rows[1:], 1, 3))
    at_once, scalar = whole.add(Piece("b", rows, 0, 3)), whole.add(Piece("c", rows[0, 1], 0, 1))
    rows.zero_()
    assert joined is not None
    assert at_once is not None
    assert scalar is not None
    assert joined.tolist() == at_once.tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    assert scalar.item() == 1.0
