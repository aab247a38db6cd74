"""Builds VeOmni's model from a Hugging Face folder, sharded, and checks that it was."""

import logging
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final, Protocol

import torch

from engine_veomni.config import VeomniConfig
from engine_veomni.hf_layout import check_folder, hugging_face_shapes, stacked_parameters
from engine_veomni.kernels import ModelKernels, kernel_names
from engine_veomni.packed_attention import ATTENTION_NAME, register_packed_attention
from engine_veomni.quiet import quiet
from engine_veomni.veomni_state import VeomniState
from parallel_state import ParallelState

MODEL_TYPES: Final = ("qwen3", "qwen3_moe")
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


def check_model_config(model_config: HuggingFaceConfig, parallel: ParallelState) -> None:
    """Refuse a model that would not run as configured; see `read_model_config`."""
    parallel.check_model(
        num_attention_heads=model_config.num_attention_heads,
        num_key_value_heads=model_config.num_key_value_heads or model_config.num_attention_heads,
        num_experts=_num_experts(model_config),
    )
    if model_config.model_type not in MODEL_TYPES:
        message = (
            f"engine-veomni: expected model_type {' or '.join(MODEL_TYPES)}, "
            f"got {model_config.model_type!r}; engine-fsdp trains any causal language model"
        )
        raise ValueError(message)
    if not model_config.architectures:
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
        # the balancing loss is no sum over tokens: it would depend on the micro-batches
        ("output_router_logits", False),
    ):
        value = getattr(model_config, name, wanted)  # a dense model has no router
        if value != wanted:
            message = (
                f"engine-veomni: expected {name} {wanted!r} in the model's config.json, "
                f"got {value!r}, which this engine would not follow"
            )
            raise ValueError(message)
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


def _num_experts(model_config: HuggingFaceConfig) -> int | None:
    """Experts of a layer, or None if no layer has any."""
    num_experts: int | None = getattr(model_config, "num_experts", None)
    if not num_experts:
        return None
    dense_layers: list[int] = getattr(model_config, "mlp_only_layers", None) or []
    step: int = getattr(model_config, "decoder_sparse_step", 1)
    sparse_layers = {
        layer for layer in range(model_config.num_hidden_layers) if (layer + 1) % step == 0
    }
    return num_experts if sparse_layers - set(dense_layers) else None


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
    names = kernel_names(config, device=device, has_experts=_num_experts(model_config) is not None)
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
        )
        if device.type == "cpu":
            _let_gloo_sum(sharded, state)
    return sharded.train(), kernels


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
