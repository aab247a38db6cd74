"""Builds VeOmni's model from a Hugging Face folder, sharded, and checks that it was."""

import logging
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from engine_veomni.config import VeomniConfig
from engine_veomni.hf_layout import check_folder, hugging_face_shapes, stacked_parameters
from engine_veomni.kernels import ModelKernels, kernel_names
from engine_veomni.packed_attention import ATTENTION_NAME, register_packed_attention
from engine_veomni.quiet import quiet
from engine_veomni.sampler_routes import RouterShape
from engine_veomni.veomni_state import VeomniState
from engine_veomni.vision import SEEING_TYPES, TOWER, vision_shape
from parallel_state import ParallelState

MODEL_TYPES: Final = ("qwen3", "qwen3_moe", *SEEING_TYPES)
"""`model_type` of the configurations that this engine trains."""


class HuggingFaceConfig(Protocol):
    """What is read of a model's config.json before its weights are."""

    @property
    def architectures(self) -> list[str] | None:
        """Names of the model's classes."""

    @property
    def model_type(self) -> str:
        """Which architecture."""

    @property
    def hidden_size(self) -> int:
        """Entries of a token's vector between the layers."""

    @property
    def num_attention_heads(self) -> int:
        """Query heads of a layer."""

    @property
    def num_hidden_layers(self) -> int:
        """Decoder layers."""

    @property
    def num_key_value_heads(self) -> int | None:
        """Key-value heads of a layer; None: as many as query heads."""

    @property
    def vocab_size(self) -> int:
        """Token ids run from 0 to this, exclusive."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertSharding:
    """Where the experts of a layer ended up, as read from the running model."""

    num_experts: int
    """Experts of a layer, over all ranks."""

    num_local_experts: int
    """Experts of a layer on this rank."""

    ep_size: int
    """Ranks in this rank's expert-parallel group; 1 without one."""


def read_model_config(config: VeomniConfig) -> HuggingFaceConfig:
    """Read config.json and refuse a model that would not run as configured.

    Runs no code from the folder.

    Raises:
        ValueError: for a model type that is not supported, expert parallelism that cannot be, or
            a setting of the model that this engine would not follow.
    """
    if not (Path(config.model_path) / "config.json").is_file():
        message = (
            f"engine-veomni: model_path {config.model_path!r} is no folder with a config.json; "
            "give a Hugging Face folder on this machine"
        )
        raise ValueError(message)
    from transformers import AutoConfig  # noqa: PLC0415 - loaded only when used

    model_config: HuggingFaceConfig = AutoConfig.from_pretrained(
        config.model_path, local_files_only=True, trust_remote_code=False
    )
    check_model_config(model_config, config.parallel)
    return model_config


def text_config(model_config: HuggingFaceConfig) -> HuggingFaceConfig:
    """What a configuration says of the language model: all of it, or its part in one that sees."""
    found: HuggingFaceConfig = getattr(model_config, "text_config", model_config)
    return found


def check_model_config(whole: HuggingFaceConfig, parallel: ParallelState) -> None:
    """Refuse a model that would not run as configured; see `read_model_config`."""
    model_config = text_config(whole)
    parallel.check_model(
        num_attention_heads=model_config.num_attention_heads,
        num_key_value_heads=model_config.num_key_value_heads or model_config.num_attention_heads,
        num_experts=_num_experts(model_config),
    )
    if whole.model_type not in MODEL_TYPES:
        message = (
            f"engine-veomni: expected model_type {' or '.join(MODEL_TYPES)}, "
            f"got {whole.model_type!r}; engine-fsdp trains any causal language model"
        )
        raise ValueError(message)
    if not whole.architectures:
        message = (
            "engine-veomni: config.json names no architectures, by which VeOmni picks the model's "
            "class; save the model with transformers' save_pretrained, which writes them"
        )
        raise ValueError(message)
    for name, wanted in (
        ("hidden_act", "silu"),
        ("attention_dropout", 0.0),
        ("sliding_window", None),
        ("tie_word_embeddings", False),
        # transformers' balancing loss of a micro-batch; see `engine_veomni.balancing`
        ("output_router_logits", False),
    ):
        # a model that sees says for all of it whether its head is the embedding
        part = whole if name == "tie_word_embeddings" else model_config
        value = getattr(part, name, wanted)  # a dense model has no router
        if value != wanted:
            message = (
                f"engine-veomni: expected {name} {wanted!r} in the model's config.json, "
                f"got {value!r}, which this engine would not follow"
            )
            if name == "output_router_logits":
                message += "; for the balancing loss, set router_aux_loss_coef of the VeomniConfig"
            raise ValueError(message)
    if vision_shape(whole) is not None:
        _check_seeing(model_config, parallel)
    if parallel.extra_parallel_sizes["ep"] == 1:
        return
    ep_fsdp_size = parallel.extra_fsdp_size("ep")
    for name, rows in (
        ("hidden_size", model_config.hidden_size),
        ("2 * moe_intermediate_size", 2 * (expert_inner_size(model_config) or 0)),
    ):
        if rows % ep_fsdp_size:
            message = (
                f"engine-veomni: dp_shard_size / ep = {ep_fsdp_size} must divide "
                f"{name} = {rows}: the experts of a rank are sharded along it"
            )
            raise ValueError(message)


def _check_seeing(model_config: HuggingFaceConfig, parallel: ParallelState) -> None:
    """Refuse what is not known to be right for a model that sees."""
    if parallel.ulysses_size > 1:
        message = (
            f"parallel.ulysses_size = {parallel.ulysses_size} with a model that sees: its images "
            "and their three-part positions are not cut into slices yet; set ulysses_size to 1"
        )
        raise ValueError(message)
    inner, hidden = expert_inner_size(model_config), model_config.hidden_size
    if inner is not None and hidden in (inner, 2 * inner):
        message = (
            f"engine-veomni: hidden_size = {hidden} and moe_intermediate_size = {inner}: whether "
            "the stacks of experts in the folder are transposed cannot be told from their shapes, "
            "and VeOmni would guess"
        )
        raise ValueError(message)


def router_shape(model_config: HuggingFaceConfig) -> RouterShape | None:
    """The routers of a model, or None if no layer has any."""
    num_experts: int | None = getattr(model_config, "num_experts", None)
    if not num_experts:
        return None
    dense_layers: list[int] = getattr(model_config, "mlp_only_layers", None) or []
    step: int = getattr(model_config, "decoder_sparse_step", 1)
    sparse_layers = {
        layer for layer in range(model_config.num_hidden_layers) if (layer + 1) % step == 0
    } - set(dense_layers)
    if not sparse_layers:
        return None
    top_k: int = getattr(model_config, "num_experts_per_tok")  # noqa: B009 - of a mixture only
    return RouterShape(num_layers=len(sparse_layers), num_experts=num_experts, top_k=top_k)


def check_replay(
    config: VeomniConfig, model_config: HuggingFaceConfig, routers: RouterShape | None
) -> None:
    """Refuse to replay a sampler's routes where it is not known which layer is which.

    Raises:
        ValueError: for a model with dense layers among those with experts.
    """
    if config.router_replay != "rollout" or routers is None:
        return
    if routers.num_layers != model_config.num_hidden_layers:
        message = (
            f"engine-veomni: router_replay = 'rollout' with experts in {routers.num_layers} of "
            f"{model_config.num_hidden_layers} layers: no sampler has been shown to number its "
            "routes alike where some layers are dense; set router_replay to 'logprobs'"
        )
        raise ValueError(message)


def _num_experts(model_config: HuggingFaceConfig) -> int | None:
    """Experts of a layer, or None if no layer has any."""
    routers = router_shape(model_config)
    return None if routers is None else routers.num_experts


def expert_inner_size(model_config: HuggingFaceConfig) -> int | None:
    """Entries of a token's vector inside an expert, or None if no layer has experts."""
    if _num_experts(model_config) is None:
        return None
    inner: int = getattr(model_config, "moe_intermediate_size")  # noqa: B009 - of a mixture only
    return inner


def build_model(
    config: VeomniConfig,
    model_config: HuggingFaceConfig,
    state: VeomniState,
    *,
    device: torch.device,
) -> tuple[torch.nn.Module, ModelKernels]:
    """VeOmni's model with its weights loaded, sharded over the ranks of `state`, and its kernels.

    Raises:
        ValueError: if the folder does not hold exactly this model's weights.
    """
    # first: the CPU backend has to be there before VeOmni's modules of experts are
    has_experts = _num_experts(text_config(model_config)) is not None
    names = kernel_names(config, device=device, has_experts=has_experts)
    from veomni.arguments.arguments_types import (  # noqa: PLC0415 - loaded only when used
        MixedPrecisionConfig,
        OpsImplementationConfig,
    )
    from veomni.distributed.torch_parallelize import parallelize_model_fsdp2  # noqa: PLC0415
    from veomni.models import build_foundation_model  # noqa: PLC0415

    register_packed_attention()
    with state.entered():
        # the warnings of these two steps are about what is chosen here on purpose
        with quiet(logging.WARNING):
            model = build_foundation_model(
                model_config,
                weights_path=config.model_path,
                torch_dtype="float32",
                init_device="meta",
                ops_implementation=OpsImplementationConfig(
                    **_eager_ops([field.name for field in fields(OpsImplementationConfig)])
                ),
            )
            kernels = ModelKernels(model, names)
        check_folder(Path(config.model_path), hugging_face_shapes(model))
        if vision_shape(model_config) is not None:
            _prepare_tower(model, config)
        if config.activation_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        sharded: torch.nn.Module = parallelize_model_fsdp2(
            model,
            weights_path=config.model_path,
            mixed_precision=MixedPrecisionConfig(
                enable=config.compute_dtype != "float32",
                param_dtype=config.compute_dtype,
                reduce_dtype="float32",
            ),
            init_device="meta",
            enable_fsdp_offload=config.offload == "parameters",
            fsdp_offload_pin_memory=device.type != "cpu",
        )
        if device.type == "cpu":
            _let_gloo_sum(sharded, state)
    return sharded.train(), kernels


def build_optimizers(
    model: torch.nn.Module, config: VeomniConfig
) -> tuple[torch.optim.Optimizer, ...]:
    """VeOmni's AdamW: one for the experts' mesh and one for the rest, or one for all."""
    from veomni.optim import build_optimizer  # noqa: PLC0415 - loaded only when used

    built = build_optimizer(
        model,
        lr=config.optim.learning_rate,
        betas=config.optim.betas,
        eps=config.optim.eps,
        weight_decay=config.optim.weight_decay,
        optimizer_type="adamw",
        fused=True,
    )
    parts = getattr(built, "optimizers_dict", None)
    return (built,) if parts is None else tuple(parts.values())


def _prepare_tower(model: torch.nn.Module, config: VeomniConfig) -> None:
    """The vision tower attends within each image, both ways, and trains or does not."""
    tower = model.get_submodule(TOWER)
    attends: Any = tower
    attends.set_attn_implementation("sdpa")
    tower.requires_grad_(not config.freeze_vision)


def _eager_ops(names: list[str]) -> dict[str, str]:
    """VeOmni's choice of kernels: plain torch everywhere, and this package's attention.

    Kernels are bound after the build: VeOmni refuses names that it does not know itself.
    """
    choices = {
        name: "eager"
        for name in names
        if name.endswith("_implementation") and name != "qat_implementation"
    }
    return {**choices, "attn_implementation": ATTENTION_NAME}


def _let_gloo_sum(model: torch.nn.Module, state: VeomniState) -> None:
    """Divide the experts' gradients after the reduction: gloo cannot scale while it sums.

    Only where there is something to reduce: FSDP2 of torch 2.13 divides twice in a shard group
    of one rank (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, `foreach_reduce`).
    """
    if state.ep_size == 1 or state.ep_fsdp_size == 1:
        return
    from torch.distributed.fsdp import FSDPModule  # noqa: PLC0415

    for name in {name.rpartition(".")[0] for name in stacked_parameters(model)}:
        experts = model.get_submodule(name)
        assert isinstance(experts, FSDPModule)  # noqa: S101 - VeOmni wraps each of them
        experts.set_force_sum_reduction_for_comms(True)


def check_experts(
    model: torch.nn.Module, parallel: ParallelState, state: VeomniState
) -> ExpertSharding:
    """Read from the running model where its experts are, and compare with what was asked.

    Raises:
        RuntimeError: if a layer holds another number of experts here, or the group has another
            size, than `extra_parallel_sizes["ep"]` says; names both.
    """
    asked = parallel.extra_parallel_sizes["ep"]
    group_size = 1 if state.ep_group is None else state.ep_group.size()
    num_experts = 0
    num_local = 0
    for name in stacked_parameters(model):
        num_local = model.get_parameter(name).shape[0]
        num_experts = vars(model.get_submodule(name.rpartition(".")[0]))["num_experts"]
        if num_local * asked != num_experts or group_size != asked:
            message = (
                f"engine-veomni: extra_parallel_sizes['ep'] = {asked} asks for "
                f"{num_experts} / {asked} experts of {name} on each rank in groups of {asked}, "
                f"got {num_local} in groups of {group_size}"
            )
            raise RuntimeError(message)
    return ExpertSharding(num_experts=num_experts, num_local_experts=num_local, ep_size=group_size)
