"""Low-rank adapters through peft, the extra `lora`: trained beside weights that stay as they are.

peft is imported on use; its layers keep the adapted weight as ``<module>.base_layer.weight`` and
the adapter as ``<module>.lora_A.default.weight`` and ``lora_B`` likewise (peft 0.21).
"""

import importlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine_fsdp.config import LoraConfig
from engine_fsdp.exporting import GATHER_BYTES
from engine_fsdp.model import PackedCausalLM
from parallel_state.gather import gather_full
from rl_contracts.expert_layout import split_stack
from rl_contracts.shared_folder import new_folder
from rl_contracts.train import NamedTensor

_BASE: Final = ".base_layer."
_A: Final = ".lora_A.default.weight"
_B: Final = ".lora_B.default.weight"


@final
class Adapters:
    """The adapters of one model."""

    def __init__(self, model: PackedCausalLM, config: LoraConfig) -> None:
        """Put them in, and freeze all else. Before the model is sharded.

        The A matrices are drawn from ``config.seed``, the same on every rank; the B matrices are 0,
        so that the adapted model computes what it did before.

        Raises:
            ImportError: without peft.
            ValueError: if a target matches no linear layer, or one that would take no effect.
        """
        peft = _peft()
        _check_targets(model, config)
        self._model = model
        self._config = config
        settings = peft.LoraConfig(
            r=config.rank,
            lora_alpha=config.alpha,
            target_modules=list(config.target_modules),
            lora_dropout=0.0,
            bias="none",
            task_type="CAUSAL_LM",
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            peft.inject_adapter_in_model(settings, model.model)
        self._settings = settings
        self._layers: tuple[Any, ...] = tuple(
            module for module in model.model.modules() if hasattr(module, "lora_A")
        )

    @contextmanager
    def switched_off(self) -> Iterator[None]:
        """Compute what the model computed without them, bit for bit: they add 0 then."""
        scalings = [dict(layer.scaling) for layer in self._layers]
        for layer in self._layers:
            layer.scaling = dict.fromkeys(layer.scaling, 0.0)
        try:
            yield
        finally:
            for layer, scaling in zip(self._layers, scalings, strict=True):
                layer.scaling = scaling

    def merged_weights(self, *, device: torch.device, dtype: torch.dtype) -> Iterator[NamedTensor]:
        """All weights under the names of the folder, the adapters added in float32; collective.

        What peft's ``merge_and_unload`` gives: ``W + alpha / rank * (B @ A)``.
        """
        gathered = gather_full(self._in_order(), None, GATHER_BYTES, device=device)
        for name, weight in gathered:
            if name.endswith(f"{_BASE}weight"):
                (_, left), (_, right) = next(gathered), next(gathered)
                weight += right @ left * (self._config.alpha / self._config.rank)  # noqa: PLW2901
            own_name = name.replace(_BASE, ".")
            if own_name in self._model.stacks:
                yield from split_stack(own_name, weight.to(dtype))
            else:
                yield NamedTensor(own_name, weight.to(dtype))

    def save(self, folder: Path, *, device: torch.device, base: Path) -> None:
        """Write a folder that peft and vLLM load as an adapter of `base`. Called on every rank.

        Raises:
            FileExistsError: if the folder exists.
        """
        from safetensors.torch import save_file  # noqa: PLC0415

        own = [(n, w) for n, w in self._model.named_weights() if n.endswith((_A, _B))]
        weights = {
            f"base_model.model.{name.replace('.default.', '.')}": weight.cpu()
            for name, weight in gather_full(own, None, GATHER_BYTES, device=device)
        }
        with new_folder(folder) as unfinished:
            if dist.get_rank() == 0:
                save_file(
                    weights, unfinished / "adapter_model.safetensors", metadata={"format": "pt"}
                )
                settings = {**self._settings.to_dict(), "base_model_name_or_path": str(base)}
                (unfinished / "adapter_config.json").write_text(
                    json.dumps(settings, indent=2, default=_plain) + "\n"
                )

    def _in_order(self) -> list[tuple[str, Tensor]]:
        """All weights, each adapted one followed by its A and its B."""
        named = dict(self._model.named_weights())
        ordered: list[tuple[str, Tensor]] = []
        for name, weight in named.items():
            if name.endswith((_A, _B)):
                continue
            ordered.append((name, weight.detach()))
            if name.endswith(f"{_BASE}weight"):
                module = name.removesuffix(f"{_BASE}weight")
                ordered += [(module + part, named[module + part].detach()) for part in (_A, _B)]
        return ordered


def _plain(value: object) -> object:
    """What of peft's settings json does not know."""
    return sorted(value) if isinstance(value, set | frozenset) else str(value)


def _check_targets(model: PackedCausalLM, config: LoraConfig) -> None:
    modules: Sequence[tuple[str, nn.Module]] = list(model.model.named_modules())
    inside = {id(module) for block in model.blocks for module in block.modules()}
    for target in config.target_modules:
        found = [m for n, m in modules if n.rpartition(".")[2] == target]
        linear = sorted(
            {
                name.rpartition(".")[2]
                for name, module in modules
                if isinstance(module, nn.Linear) and id(module) in inside
            }
        )
        if not found or not all(isinstance(m, nn.Linear) and id(m) in inside for m in found):
            message = (
                f"lora.target_modules: {target!r} names no linear layer inside of the blocks of "
                f"{type(model.model).__name__}, which has {', '.join(linear)}; the head, the "
                "embedding and stacked experts take no adapter here"
            )
            raise ValueError(message)


def _peft() -> Any:  # noqa: ANN401  # without types, and not always installed
    try:
        return importlib.import_module("peft")
    except ImportError as error:
        message = (
            "lora: expected the package peft; install the extra: pip install engine-fsdp[lora]"
        )
        raise ImportError(message) from error
