"""Our half of vLLM's engine process: receives weights and reports what it runs with.

vLLM imports this module through ``worker_extension_cls`` before it builds its weight-transfer
engine: that import is the one hook that works in a spawned process without an entry point, so
registering (and watching the parent) is done here, at
import. Nothing else imports this module.
"""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import wait

import torch
from vllm.config import VllmConfig as EngineConfig, WeightTransferConfig
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from rollout_vllm.arguments import TRANSFER_BACKEND
from rollout_vllm.copy_plan import Piece
from rollout_vllm.cpu_preparation import ModelRunner, prepare_cpu
from rollout_vllm.engine_report import report_settings
from rollout_vllm.engine_seeds import seed_engine
from rollout_vllm.file_receiver import published_headers, published_pieces
from rollout_vllm.headers import TensorHeader
from rollout_vllm.lora_loading import AdapterLoader, adapter_manager
from rollout_vllm.stream_receiver import IncomingStream, StreamReceiver
from rollout_vllm.weight_loading import TIED_HEAD, Loading, WeightLoader


@dataclass
class RolloutInitInfo(WeightTransferInitInfo):
    """Nothing to agree on: every update says how it comes."""


@dataclass
class RolloutUpdateInfo(WeightTransferUpdateInfo):
    """Where one version of the weights comes from."""

    instructions: dict[str, object]
    """Of a `rollout_vllm.publication.Publication` that the sampler has checked."""

    tied: bool
    """Whether the head shares the embedding's weight."""


class RolloutTransferEngine(WeightTransferEngine[RolloutInitInfo, RolloutUpdateInfo]):
    """Receives weights by any of our transports and loads them into the running model.

    Beside vLLM's own engines (0.25.1 to 0.32) for four reasons: they take pickled handles, their
    sending halves import vLLM, none runs on the CPU, and they look up the place of every tensor by
    name, every time.
    """

    init_info_cls = RolloutInitInfo
    update_info_cls = RolloutUpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self,
        config: WeightTransferConfig,
        vllm_config: EngineConfig,
        device: torch.device,
        model: torch.nn.Module,
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self.loader = WeightLoader(model, vllm_config.model_config, device)
        self.adapters: AdapterLoader | None = None
        """Takes all updates, where they are adapters."""

        self._streams = StreamReceiver(device)
        self._incoming: IncomingStream | None = None
        self._meeting_s = 0.0
        self.report: dict[str, object] = {}

    def init_transfer_engine(self, init_info: RolloutInitInfo) -> None:
        """Nothing to prepare."""

    def start_weight_update(self) -> None:
        """Nothing to prepare: `receive_weights` does all of it, or none."""

    def update_weights(self, update_info: dict[str, object]) -> None:
        """Load one version of the weights.

        Replaces the base class's method, which then synchronises `torch.accelerator` and so
        raises on the CPU.
        """
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def meet(self, instructions: dict[str, object]) -> None:
        """Reach the sender, if there is one, before a weight is touched.

        Raises:
            OSError: if it is not reached.
        """
        self.part("the sampler has another update")
        begin = time.perf_counter()
        if instructions["transport"] == "stream":
            self._incoming = self._streams.receive(instructions)
        self._meeting_s = time.perf_counter() - begin

    def part(self, reason: str) -> None:
        """Give up what `meet` reached, if anything."""
        if self._incoming is not None:
            self._incoming.refuse(reason)
            self._incoming = None

    def receive_weights(self, update_info: RolloutUpdateInfo) -> None:
        """Take what the transport brings, bucket by bucket, and make the model whole."""
        instructions, tied = update_info.instructions, update_info.tied
        if instructions["transport"] == "files":
            self._load(published_pieces(instructions), published_headers(instructions), tied=tied)
            return
        if self._incoming is None:
            raise RuntimeError("receive_weights: expected a call of `meet` before")
        with self._incoming as stream:
            self._incoming = None
            self._load(stream.buckets(), stream.tensors, tied=tied)

    def _load(
        self,
        buckets: Iterator[list[Piece]],
        tensors: Mapping[str, TensorHeader],
        *,
        tied: bool,
    ) -> None:
        met = time.perf_counter()
        loading: Loading = (
            self.loader.begin(tensors, tied=tied)
            if self.adapters is None
            else self.adapters.begin()
        )
        begun = time.perf_counter()
        loading_s = 0.0
        for pieces in buckets:
            came = time.perf_counter()
            # a tied head that was sent too equals the embedding: the sampler has checked what it
            # could
            loading.load(piece for piece in pieces if not (tied and piece.name == TIED_HEAD))
            loading_s += time.perf_counter() - came
        received = time.perf_counter()
        loading.finish()
        self.report = {
            "loading": type(loading).__name__,
            "why_layerwise": self.loader.reason_for_layerwise,
            "meeting_s": self._meeting_s,
            "planning_s": begun - met,
            "receiving_s": received - begun,
            "of_which_loading_s": loading_s,
            "finishing_s": time.perf_counter() - received,
        }

    def finish_weight_update(self) -> None:
        """Nothing left to do."""

    def shutdown(self) -> None:
        """Leave the groups of senders."""
        self.part("the engine ends")
        self._streams.close()

    @staticmethod
    def trainer_send_weights(iterator: Iterator[object], trainer_args: object) -> None:
        """An abstract method of vLLM 0.25.1, whose sending half is a static method."""
        raise NotImplementedError("send with rollout_vllm.publish_weights or WeightStream")


class WorkerExtension:
    """Methods that vLLM mixes into its worker, to be called from the sampler."""

    vllm_config: EngineConfig
    model_runner: ModelRunner
    weight_transfer_engine: RolloutTransferEngine
    device: torch.device

    def rollout_prepare(self) -> None:
        """Do what vLLM has left undone at its start."""
        if self.device.type == "cpu":
            prepare_cpu(self.vllm_config, self.model_runner)

    def rollout_prepare_adapter(
        self, shapes: dict[str, list[int]], rank: int, scaling: float
    ) -> None:
        """Take adapters from now on, and begin with one of zeros."""
        engine = self.weight_transfer_engine
        engine.adapters = AdapterLoader(
            adapter_manager(engine.model),
            shapes,
            rank=rank,
            scaling=scaling,
            device=self.device,
        )

    def rollout_take_adapter(self, update_info: dict[str, object]) -> None:
        """Replace the adapter, without the end of vLLM's updates, which forgets all of them."""
        self.weight_transfer_engine.update_weights(update_info)

    def rollout_meet(self, instructions: dict[str, object]) -> None:
        """Reach the sender of an update, if there is one, before a weight is touched."""
        self.weight_transfer_engine.meet(instructions)

    def rollout_part(self, reason: str) -> None:
        """Give up the sender that was reached."""
        self.weight_transfer_engine.part(reason)

    def rollout_update_report(self) -> dict[str, object]:
        """How the last update of the weights went, and how long its parts took, in seconds."""
        return self.weight_transfer_engine.report

    def rollout_allow_in_place(self, allowed: bool) -> None:  # noqa: FBT001  (by collective_rpc)
        """Load weights in place where that is right, or by vLLM's own reload, to compare with."""
        self.weight_transfer_engine.loader.in_place_allowed = allowed

    def rollout_used_memory(self) -> int:
        """Bytes in use on this worker's device, by whomever."""
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free

    def rollout_environment(self) -> dict[str, str]:
        """Variables that vLLM and OpenMP read, as this process found them."""
        return {
            name: value
            for name, value in os.environ.items()
            if name.startswith(("VLLM_", "OMP_", "GOMP_", "KMP_"))
        }

    def rollout_seed(self) -> int:
        """Give this data-parallel engine a random stream of its own."""
        config = self.vllm_config
        index = config.parallel_config.data_parallel_index
        return seed_engine(config.model_config.seed, index=index)

    def rollout_settings(self) -> dict[str, dict[str, object]]:
        """What this worker really runs with: plain values of its resolved config."""
        return report_settings(self.vllm_config, model_runner=self.model_runner)


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
    WeightTransferEngineFactory.register_engine(TRANSFER_BACKEND, RolloutTransferEngine)
