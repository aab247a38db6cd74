"""The receiving half of the shared-memory weight transfer; lives in vLLM's engine process.

vLLM imports this module through ``worker_extension_cls`` before it builds its weight-transfer
engine: that import is the one hook that works in a spawned process without an entry point, so
registering (and watching the parent) is done here, at
import. Nothing else imports this module.

On the CPU vLLM packs weights for its kernels when it first loads them, and its own reload keeps
two of these copies without a word (`UnquantizedEmbeddingMethod` and `UnquantizedFusedMoEMethod`,
vLLM 0.23 to 0.32): a head that is tied to the embedding, and the experts. Both are packed anew
here.
"""

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Protocol, cast

import torch
from safetensors import safe_open
from vllm.config import VllmConfig as EngineConfig
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_processing,
    initialize_layerwise_reload,
)

from rollout_vllm.arguments import TRANSFER_BACKEND

_TIED_HEAD = "lm_head.weight"


class SupportsLoadWeights(Protocol):
    """What every model of vLLM has, beside being a module."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        """Load weights under their checkpoint names."""


@dataclass
class SharedMemoryInitInfo(WeightTransferInitInfo):
    """Nothing to agree on: every update says where its files are."""


@dataclass
class SharedMemoryUpdateInfo(WeightTransferUpdateInfo):
    """Where one version of the weights lies."""

    paths: list[str]
    """Safetensors files, checked by the sampler against the model beforehand."""

    tied: bool
    """Whether the head shares the embedding's weight."""


class SharedMemoryEngine(WeightTransferEngine[SharedMemoryInitInfo, SharedMemoryUpdateInfo]):
    """Loads weights from files in shared memory into the running model."""

    init_info_cls = SharedMemoryInitInfo
    update_info_cls = SharedMemoryUpdateInfo
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: SharedMemoryInitInfo) -> None:  # noqa: ARG002  (vLLM names it)
        """Quiet a warning that says "Failed to load weights" of layers that have none.

        Names and shapes were checked beforehand, by the sampler.
        """
        logging.getLogger(initialize_layerwise_reload.__module__).setLevel(logging.ERROR)

    def start_weight_update(self) -> None:
        """Nothing to prepare: `receive_weights` does all of it, or none."""

    def update_weights(self, update_info: dict[str, object]) -> None:
        """Load one version of the weights.

        Replaces the base class's method, which then synchronises `torch.accelerator` and so
        raises on the CPU.
        """
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: SharedMemoryUpdateInfo) -> None:
        """Load the files and pack the weights for the CPU's kernels again."""
        with torch.no_grad(), torch.device(self.device):
            for layer in self.model.modules():
                method = getattr(layer, "quant_method", None)
                if isinstance(method, FusedMoEMethodBase):
                    # makes vLLM build the kernel again instead of copying into the old one
                    method.moe_kernel = None
            initialize_layerwise_reload(self.model)
            cast("SupportsLoadWeights", self.model).load_weights(_read(update_info))
            finalize_layerwise_processing(self.model, self.model_config)
            if update_info.tied:
                for layer in self.model.modules():
                    if isinstance(layer, ParallelLMHead):
                        layer.quant_method.process_weights_after_loading(layer)

    def finish_weight_update(self) -> None:
        """Nothing left to do."""

    def shutdown(self) -> None:
        """Nothing is held."""


def _read(update_info: SharedMemoryUpdateInfo) -> Iterator[tuple[str, torch.Tensor]]:
    for path in update_info.paths:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                # the sampler has checked that a tied head equals the embedding
                if not (update_info.tied and name == _TIED_HEAD):
                    yield name, file.get_tensor(name)


class WorkerExtension:
    """Methods that vLLM mixes into its worker, to be called from the sampler."""

    vllm_config: EngineConfig

    def rollout_environment(self) -> dict[str, str]:
        """Variables that vLLM and OpenMP read, as this process found them."""
        return {
            name: value
            for name, value in os.environ.items()
            if name.startswith(("VLLM_", "OMP_", "GOMP_", "KMP_"))
        }

    def rollout_settings(self) -> dict[str, dict[str, object]]:
        """What the engine's process really runs with: plain values of its resolved config."""
        config = self.vllm_config
        parts = {
            "engine": config,
            "model": config.model_config,
            "cache": config.cache_config,
            "parallel": config.parallel_config,
            "scheduler": config.scheduler_config,
            "load": config.load_config,
            "device": config.device_config,
        }
        plain: dict[str, dict[str, object]] = {
            name: {
                key: str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
                for key, value in vars(part).items()
                if isinstance(value, torch.dtype | bool | int | float | str | None)
            }
            for name, part in parts.items()
        }
        plain["process"] = {"id": os.getpid(), "torch_threads": torch.get_num_threads()}
        return plain


def _end_with_parent() -> None:
    """End this process when the sampler's process is gone, however that ended.

    vLLM's engine outlives a killed parent and keeps its memory (seen with 0.32).
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="rollout-vllm-parent-watch", daemon=True).start()


_end_with_parent()
if TRANSFER_BACKEND not in WeightTransferEngineFactory._registry:  # noqa: SLF001  (no query)
    WeightTransferEngineFactory.register_engine(TRANSFER_BACKEND, SharedMemoryEngine)
