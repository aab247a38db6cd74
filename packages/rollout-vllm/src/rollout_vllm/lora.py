"""Adapters (LoRA) as updates: the sampler keeps the model of its folder, and takes adapters alone.

::

    trainer, adapters beside frozen weights        sampler, VllmConfig.lora
    names of peft's state dict ── any transport ──▶ names and shapes against the model's
    base_model.model.<module>.lora_A.weight         one adapter for all requests, replaced whole
    base_model.model.<module>.lora_B.weight         y = W x + alpha / rank * B (A x)

An adapter goes the way of whole weights, in a few megabytes: `VllmSampler.load_weights`, files, a
stream, a `ReplicaSet`. Until the first one comes the sampler is the model of its folder.
"""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from rollout_vllm.arguments import EffectiveArgument
from rollout_vllm.headers import TensorHeader

if TYPE_CHECKING:
    from torch import Tensor

ADAPTER_ID = 1
"""vLLM's number of the one adapter; every update replaces what stands under it."""

# what vLLM's max_lora_rank may be (MaxLoRARanks in vllm/config/lora.py, 0.23 to 0.32)
_ROOMS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"
_SHOWN = 3
_MATRIX = 2  # dimensions

# of peft's adapter_config.json: what would make another product of the same matrices
_PLAIN: Mapping[str, tuple[object, ...]] = {
    "bias": ("none",),
    "use_dora": (None, False),
    "use_rslora": (None, False),
    "fan_in_fan_out": (None, False),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "modules_to_save": (None, []),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None,),
    # others (pissa, olora, corda, loftq) change the weights that the adapter stands beside
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}


@attrs.frozen(kw_only=True)
class Lora:
    """The adapters that a sampler takes; all three must be what the trainer trains.

    An update that does not have exactly these matrices is refused, but for `alpha`, which no
    matrix shows: `adapter_weights` compares it with what peft writes beside them.
    """

    rank: int = attrs.field(
        validator=attrs.validators.and_(attrs.validators.ge(1), attrs.validators.le(_ROOMS[-1]))
    )
    """Inner dimension of every product, 512 at most. vLLM keeps room for the next larger of its
    own ranks (1, 8, 16, 32, 64, ...), which changes no result."""

    alpha: float = attrs.field(
        validator=attrs.validators.and_(attrs.validators.gt(0.0), attrs.validators.lt(math.inf))
    )
    """Each product is multiplied by `alpha` / `rank`, as in Hu et al. 2021 (arXiv:2106.09685)."""

    target_modules: tuple[str, ...] = attrs.field(validator=attrs.validators.min_len(1))
    """Last part of the names of the linear layers that are adapted, in every block, in the
    checkpoint's names: `q_proj` though vLLM computes with one `qkv_proj`."""

    @property
    def scaling(self) -> float:
        """What each product is multiplied by."""
        return self.alpha / self.rank

    def further_arguments(self) -> dict[str, EffectiveArgument]:
        """What vLLM is given beside `enable_lora`."""
        return {
            "max_lora_rank": EffectiveArgument(
                value=next(room for room in _ROOMS if room >= self.rank),
                origin=f"derived from VllmConfig.lora.rank = {self.rank}: vLLM's next",
            ),
            "max_loras": EffectiveArgument(
                value=1, origin="derived from VllmConfig.lora: one adapter for all requests"
            ),
            "lora_target_modules": EffectiveArgument(
                value=list(self.target_modules), origin="VllmConfig.lora.target_modules"
            ),
        }

    def tensors(self, model: Mapping[str, TensorHeader]) -> dict[str, TensorHeader]:
        """Names and shapes of an adapter of this model.

        Args:
            model: names and shapes of the model's own weights, [out, in] for a linear layer.

        Returns:
            For each adapted layer A: [rank, in] and B: [out, rank].

        Raises:
            ValueError: if a target names nothing, or something else than linear layers of blocks.
        """
        linear = {
            name.removesuffix(".weight"): header
            for name, header in model.items()
            if name.endswith(".weight") and len(header.shape) == _MATRIX and _inside_a_block(name)
        }
        kinds = {module.rpartition(".")[2] for module in linear}
        for target in self.target_modules:
            named = [name for name in model if name.endswith(f".{target}.weight")]
            named += [name for name in model if name == f"{target}.weight"]
            if not named or any(name.removesuffix(".weight") not in linear for name in named):
                raise ValueError(
                    f"VllmConfig.lora: target_modules: {target!r} names no linear layer inside of "
                    f"the blocks of the model, which has {', '.join(sorted(kinds))}; the head, the "
                    "embedding and experts take no adapter here"
                )
        adapter: dict[str, TensorHeader] = {}
        for module, header in linear.items():
            if module.rpartition(".")[2] in self.target_modules:
                rows, columns = header.shape
                adapter[f"{_PREFIX}{module}{_A}"] = TensorHeader(header.dtype, (self.rank, columns))
                adapter[f"{_PREFIX}{module}{_B}"] = TensorHeader(header.dtype, (rows, self.rank))
        return adapter


def split_name(name: str) -> tuple[str, str]:
    """The adapted layer's name in the checkpoint, and "A" or "B", of a name of an adapter."""
    module, matrix, _ = name.removeprefix(_PREFIX).rsplit(".", 2)
    return module, matrix.removeprefix("lora_")


def check_is_adapter(sent: Mapping[str, object], expected: Mapping[str, object]) -> None:
    """Refuse what is no adapter at all, such as a whole model.

    Args:
        sent: by name, what came.
        expected: by name, what `Lora.tensors` says.

    Raises:
        ValueError: names what came and what would do.
    """
    if not sent.keys() & expected.keys():
        first = ", ".join(map(repr, list(sent)[:_SHOWN]))
        raise ValueError(
            f"VllmConfig.lora is set, so updates are adapters, under the names of peft's state "
            f"dict such as {next(iter(expected))!r}; got {len(sent)} other tensors ({first}); send "
            "adapters alone, or leave VllmConfig.lora out for whole weights"
        )


def adapter_weights(folder: Path, lora: Lora) -> "Iterator[tuple[str, Tensor]]":
    """The matrices of an adapter that peft or `FsdpEngine.save_adapter` wrote.

    Args:
        folder: holds adapter_config.json and adapter_model.safetensors.
        lora: what the sampler was told.

    Returns:
        Names and tensors for `VllmSampler.load_weights` or `publish_weights`.

    Raises:
        ValueError: if the adapter is of another kind than the sampler applies: another rank, alpha
            or target, or something beside the two matrices.
    """
    from safetensors import safe_open  # noqa: PLC0415  (loads torch)

    written = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    targets = written["target_modules"]
    found = {
        "r": written["r"],
        "lora_alpha": written["lora_alpha"],
        "target_modules": targets if isinstance(targets, str) else sorted(targets),
    }
    expected = {
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": sorted(lora.target_modules),
    }
    problems = [
        f"{key} = {found[key]!r}, expected {value!r} (VllmConfig.lora)"
        for key, value in expected.items()
        if found[key] != value
    ]
    problems += [
        f"{key} = {written[key]!r}, which is not applied here"
        for key, plain in _PLAIN.items()
        if written.get(key, plain[0]) not in plain
    ]
    if problems:
        raise ValueError(f"{folder / 'adapter_config.json'}: " + "; ".join(problems))

    def weights() -> "Iterator[tuple[str, Tensor]]":
        with safe_open(folder / "adapter_model.safetensors", framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                yield name, file.get_tensor(name)

    return weights()


def _inside_a_block(name: str) -> bool:
    """Whether a weight stands in a numbered block, and not among its experts."""
    before, _, after = name.partition(".experts.")
    return not after and any(part.isdigit() for part in before.split("."))
