"""Models and degrees that are refused before any weight is read."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, Qwen3Config, Qwen3MoeConfig

from engine_veomni import OptimConfig, VeomniConfig
from engine_veomni.build import (
    check_model_config,
    check_replay,
    read_model_config,
    router_shape,
)
from parallel_state import ExtraParallelSizes, ParallelState


def moe(**changes: Any) -> Qwen3MoeConfig:  # noqa: ANN401 - any setting of the model
    settings: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts": 6,
        "moe_intermediate_size": 12,
        "architectures": ["Qwen3MoeForCausalLM"],
        **changes,
    }
    return Qwen3MoeConfig(**settings)


def over(*, dp_size: int = 1, ep: int = 1) -> ParallelState:
    return ParallelState(dp_size=dp_size, extra_parallel_sizes=ExtraParallelSizes.of(ep=ep))


def test_a_mixture_of_experts_is_accepted() -> None:
    """Six experts spread over two or three ranks."""
    check_model_config(moe(), over())
    check_model_config(moe(), over(dp_size=2, ep=2))
    check_model_config(moe(), over(dp_size=6, ep=3))


def test_ep_must_divide_the_experts() -> None:
    """The message holds both numbers, and those that work."""
    with pytest.raises(ValueError, match=r"'ep'\] = 4 must divide the 6 experts; use 1, 2, 3 or 6"):
        check_model_config(moe(), over(dp_size=4, ep=4))


@pytest.mark.parametrize(
    "dense",
    [Qwen3Config(), moe(num_experts=0), moe(mlp_only_layers=[0, 1]), moe(decoder_sparse_step=3)],
    ids=["dense-model", "no-experts", "only-dense-layers", "no-sparse-layer"],
)
def test_a_dense_model_has_no_experts_to_spread(dense: Qwen3Config | Qwen3MoeConfig) -> None:
    """Expert parallelism without experts would be a setting without effect."""
    with pytest.raises(ValueError, match=r"'ep'\] = 2 has no effect on a model without experts"):
        check_model_config(dense, over(dp_size=2, ep=2))


def test_another_model_is_sent_to_the_other_engine() -> None:
    """The message names what is supported and what would work."""
    with pytest.raises(
        ValueError, match=r"qwen3 or qwen3_moe or .*, got 'llama'; engine-fsdp trains any"
    ):
        check_model_config(LlamaConfig(), over())


def test_a_dense_model_is_accepted_without_expert_parallelism() -> None:
    """Qwen3, over four data-parallel ranks."""
    check_model_config(Qwen3Config(architectures=["Qwen3ForCausalLM"]), over(dp_size=4))


def test_a_configuration_without_architectures_is_refused() -> None:
    """VeOmni would fail with a TypeError of its own."""
    with pytest.raises(ValueError, match=r"names no architectures, .* save_pretrained"):
        check_model_config(moe(architectures=None), over())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_act", "gelu"),
        ("attention_dropout", 0.1),
        ("tie_word_embeddings", True),
        ("output_router_logits", True),
    ],
)
def test_a_model_setting_that_would_not_be_followed_is_refused(name: str, value: object) -> None:
    """VeOmni's experts know SwiGLU alone, and the passes of this engine draw nothing."""
    with pytest.raises(ValueError, match=rf"expected {name} .* got {value!r}, which this engine"):
        check_model_config(moe(**{name: value}), over())


def test_the_models_own_balancing_loss_is_sent_to_the_setting() -> None:
    """The model would compute it of each micro-batch."""
    with pytest.raises(ValueError, match=r"set router_aux_loss_coef of the VeomniConfig"):
        check_model_config(moe(output_router_logits=True), over())


def test_routes_of_a_sampler_are_for_models_whose_layers_all_have_experts() -> None:
    """With dense layers between them, which layer is which is not known."""
    config = VeomniConfig(
        model_path="model", optim=OptimConfig(learning_rate=1e-5), router_replay="rollout"
    )
    even, uneven = moe(), moe(num_hidden_layers=3, mlp_only_layers=[0])
    shape = router_shape(even)
    assert shape is not None
    assert (shape.num_layers, shape.num_experts, shape.top_k) == (2, 6, 8)
    check_replay(config, even, shape)
    with pytest.raises(ValueError, match=r"experts in 2 of 3 layers: .* set router_replay to 'log"):
        check_replay(config, uneven, router_shape(uneven))
    other = VeomniConfig(
        model_path="model", optim=OptimConfig(learning_rate=1e-5), router_replay="logprobs"
    )
    check_replay(other, uneven, router_shape(uneven))


def test_a_sliding_window_is_refused() -> None:
    """The packed attention looks at the whole sequence."""
    config = moe(use_sliding_window=True, sliding_window=4, max_window_layers=0)
    with pytest.raises(ValueError, match=r"expected sliding_window None .* got 4"):
        check_model_config(config, over())


def test_shards_of_an_expert_must_be_even() -> None:
    """FSDP2 shards experts along a dimension that it cannot pad."""
    with pytest.raises(ValueError, match=r"ep = 5 must divide hidden_size = 32"):
        check_model_config(moe(), over(dp_size=10, ep=2))


def test_no_code_of_the_folder_is_run(tmp_path: Path) -> None:
    """A folder that asks for its own code is an error, whoever wrote it."""
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "mine", "auto_map": {"AutoConfig": "evil.Config"}})
    )
    (tmp_path / "evil.py").write_text("raise SystemExit('the folder ran code')")
    config = VeomniConfig(model_path=str(tmp_path), optim=OptimConfig(learning_rate=1e-5))
    with pytest.raises(ValueError, match="trust_remote_code"):
        read_model_config(config)


def test_a_path_without_a_model_is_refused(tmp_path: Path) -> None:
    """Nothing is looked up elsewhere: a name on a model hub is no folder."""
    config = VeomniConfig(model_path=str(tmp_path), optim=OptimConfig(learning_rate=1e-5))
    with pytest.raises(ValueError, match=r"is no folder with a config\.json; give a Hugging Face"):
        read_model_config(config)
