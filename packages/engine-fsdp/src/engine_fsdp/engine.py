"""The engine: FSDP2 around a packed causal LM, one optimizer, and what may be asked of both."""

import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor

from engine_fsdp.compute import DTYPES, ShardedPolicy
from engine_fsdp.config import FsdpConfig
from engine_fsdp.devices import claim_device
from engine_fsdp.exporting import exported_weights
from engine_fsdp.head import TokenStatistics
from engine_fsdp.lora import Adapters
from engine_fsdp.losses import GuardedLosses, gradient_problem
from engine_fsdp.model import load_model
from engine_fsdp.optimizer import PolicyOptimizer
from engine_fsdp.roll_call import RollCall, require_process_group
from engine_fsdp.saving import PendingCheckpoint
from engine_fsdp.sharding import clip_gradients, gradient_norm
from engine_fsdp.state import TrainingState
from engine_fsdp.training_set import (
    block_matrices,
    eight_bit_weights,
    freeze,
    trained_parameters,
)
from parallel_state.mesh import build_meshes
from parallel_state.parking import (
    Parked,
    park,
    require_on_device,
    require_parkable,
    unpark,
)
from rl_contracts.batch_checks import check_shared, check_together
from rl_contracts.pretrained import write_pretrained
from rl_contracts.rollout import PolicyVersion
from rl_contracts.train import BatchT, LossFn, NamedTensor, StepResult, TokenBatch

_LOG = logging.getLogger(__name__)


@final
class FsdpEngine:
    """Trains one policy on the data-parallel ranks of this run: a `TrainEngine`.

    Every rank builds one with an equal config, and calls the same methods in the same order.

    A batch that is refused, a loss that is not finite and a gradient that is not finite leave
    weights, optimizer and version as they were; the gradient added up so far is dropped.
    """

    def __init__(self, config: FsdpConfig, *, device: torch.device) -> None:
        """Load the weights, shard them, and see that what runs is what was asked for.

        Args:
            config: what to train and how.
            device: where this rank computes, a CPU or a GPU. The process group's backend must
                serve it, and a GPU becomes the current device of this process.

        Raises:
            RuntimeError: if torch.distributed is not initialised (see
                `parallel_state.process_group.init_process_group`), or if
                the running model is not as configured.
            ValueError: for a device that the config cannot run on, a world that
                ``config.parallel`` does not fill, or weights that do not fit (see `load_model`).
            FileNotFoundError: if the folder lacks config.json or the weights.
        """
        require_process_group("FsdpEngine")
        self._config = config
        self._device = claim_device(device, config)
        if config.deterministic:
            torch.use_deterministic_algorithms(True)
        meshes = build_meshes(config.parallel, device.type)
        self._mesh = meshes.fsdp
        self._model = load_model(Path(config.model_path), temperature=config.temperature)
        self._adapters = None if config.lora is None else Adapters(self._model, config.lora)
        freeze(self._model, config.freeze)
        self._policy = ShardedPolicy(self._model, config=config, device=self._device, meshes=meshes)
        self._parameters = trained_parameters(self._model)
        self._optimizer = PolicyOptimizer(
            self._parameters,
            config.optim,
            muon=config.muon,
            matrices=block_matrices(self._model),
            eight_bit=eight_bit_weights(self._model) if config.eight_bit_moments else frozenset(),
        )
        self._state = TrainingState(
            self._model, self._optimizer, mesh=self._mesh, device=self._device
        )
        self._vocab_size: int = self._model.model.get_input_embeddings().num_embeddings
        self._policy_version = PolicyVersion(0)
        self._has_gradient = False
        self._losses: list[GuardedLosses[Any]] = []
        self._not_finite = ""
        self._parked: Parked | None = None
        self._roll_call = RollCall(timeout_s=config.wait_timeout_s)

    @property
    def config(self) -> FsdpConfig:
        """What this engine was built from."""
        return self._config

    @property
    def policy_version(self) -> PolicyVersion:
        """Optimizer steps behind the present weights."""
        return self._policy_version

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next optimizer step."""
        return self._config.optim.learning_rate_at(self._policy_version)

    @torch.no_grad()
    def logprobs(self, micro_batches: Sequence[BatchT]) -> list[Float[Tensor, " tokens"]]:
        """Log-probabilities of the given tokens under the present weights, without gradient.

        Raises:
            ValueError: on every rank, if the ranks were given different numbers of micro-batches,
                or one of them is malformed.
        """
        found = self._forward("logprobs", micro_batches, with_entropies=False)
        return [statistics.logprobs for statistics in found]

    @torch.no_grad()
    def token_statistics(self, micro_batches: Sequence[BatchT]) -> list[TokenStatistics]:
        """What `logprobs` returns and, from the same pass, the entropy at each of its tokens.

        Both are 0 where ``loss_mask`` is False. For metrics and bonuses that need no gradient.

        Raises:
            ValueError: as `logprobs` does.
        """
        return self._forward("token_statistics", micro_batches, with_entropies=True)

    def forward_backward(
        self, micro_batches: Sequence[BatchT], loss_fn: LossFn[BatchT]
    ) -> dict[str, float]:
        """Add the gradient of the loss, summed over micro-batches and ranks, to what is there.

        Raises:
            ValueError: on every rank, if the ranks were given different numbers of micro-batches,
                one of them is malformed, `loss_fn` returned other metrics for one of them than for
                another, or a loss without gradient for one that has tokens in its loss mask.
            FloatingPointError: on every rank, if the loss of a micro-batch is not finite; names its
                trajectories. With ``config.on_non_finite`` "skip" the next step is skipped instead.
            RuntimeError: if `loss_fn` raised on another rank; names it. On the rank itself, what it
                raised.
            TimeoutError: if a rank does not come; see `RollCall`.
        """
        losses = GuardedLosses(loss_fn)
        is_whole = False
        try:
            self._check("forward_backward", micro_batches)
            # All at once and first: a copy to the device waits for the work that is queued there.
            moved = [(self._policy.prepare(b), b.to(self._device)) for b in micro_batches]
            for batch, (inputs, on_device) in zip(micro_batches, moved, strict=True):
                policy_logprobs = self._policy.statistics(inputs).logprobs
                losses.take(policy_logprobs, on_device, batch).backward()
            totals, not_finite = losses.sum_over_ranks(
                policy_version=self._policy_version,
                skip=self._config.on_non_finite == "skip",
            )
            is_whole = True
        finally:
            self._policy.reshard()
            if not is_whole:
                self._drop_gradient()
        self._has_gradient = True
        self._losses.append(losses)
        self._not_finite = self._not_finite or not_finite
        # Ranks that share their sequences each computed the whole loss of them.
        ulysses_size = self._config.parallel.ulysses_size
        return {name: total / ulysses_size for name, total in totals.items()}

    def optim_step(self) -> StepResult:
        """Clip, step, clear the gradient, and raise the policy version by one.

        Raises:
            RuntimeError: if there is no gradient to step along.
            FloatingPointError: if the gradient is not finite; the weights stay as they are. Names
                the micro-batches whose loss has such a gradient, if any has. With
                ``config.on_non_finite`` "skip" the step is skipped and counted instead.
            ValueError: past the end of a schedule that fell to 0, where no weight would change.
            TimeoutError: if a rank does not come; see `RollCall`.
        """
        if not self._has_gradient:
            message = (
                f"optim_step: there is no gradient at policy version {self._policy_version}; call "
                "forward_backward first (a failed one leaves none)"
            )
            raise RuntimeError(message)
        self._roll_call.answer("optim_step", policy_version=self._policy_version)
        self._optimizer.check_rate(steps_done=self._policy_version)
        total_norm = gradient_norm(self._parameters.values(), mesh=self._mesh)
        grad_norm = total_norm.item()
        not_finite = self._not_finite or gradient_problem(
            grad_norm, self._losses, policy_version=self._policy_version
        )
        if not_finite:
            self._drop_gradient()
            if self._config.on_non_finite == "abort":
                raise FloatingPointError(not_finite)
            _LOG.warning("the step was skipped: %s", not_finite)
            return self._count_step(math.nan if math.isfinite(grad_norm) else grad_norm)
        max_norm = self._config.optim.max_grad_norm
        if max_norm is not None:
            clip_gradients(self._parameters.values(), norm=total_norm, max_norm=max_norm)
        self._optimizer.step(steps_done=self._policy_version)
        self._drop_gradient()
        return self._count_step(grad_norm)

    def export_weights(self) -> Iterator[NamedTensor]:
        """All weights under their names in the folder, whole, in the type ``config.export_dtype``.

        A weight that the model ties to another is yielded once, under the other's name. Experts
        that the folder holds one by one are yielded so. Every rank must run the iterator to its
        end; see `exported_weights` for the memory that it takes.
        """
        require_on_device("FsdpEngine.export_weights", self._parked)
        dtype = DTYPES[self._config.resolved_export_dtype]
        if self._adapters is not None:
            return self._adapters.merged_weights(device=self._device, dtype=dtype)
        return exported_weights(self._model, device=self._device, dtype=dtype)

    def save_checkpoint(self, folder: Path) -> None:
        """Write weights, optimizer, schedule, random states and version into a new folder.

        The folder appears whole, by one rename. The schedule is a function of the version.

        Raises:
            FileExistsError: if the folder exists.
            OSError: on every rank, if one cannot write its part; no folder appears. Or if the
                checkpoint that was being written in the background could not be.
        """
        require_on_device("FsdpEngine.save_checkpoint", self._parked)
        self._state.save(folder, self._policy_version)

    def begin_checkpoint(self, folder: Path) -> PendingCheckpoint:
        """The same, written in the background: returns when the state is copied to host memory.

        The copy is as large as this rank's part of the state, and is freed when it is written. One
        checkpoint is written at a time: this one waits for the one before.

        Raises:
            FileExistsError: if the folder exists.
            OSError: on every rank, if the folder cannot be made, or if the checkpoint before could
                not be written. What happens in the background is raised by
                `PendingCheckpoint.wait`, and by the next call of this class that saves or loads.
        """
        require_on_device("FsdpEngine.begin_checkpoint", self._parked)
        return self._state.begin(folder, self._policy_version)

    def load_checkpoint(self, folder: Path) -> None:
        """Take all of it back, on any number of ranks; a gradient added up so far is dropped.

        On as many ranks as wrote it, going on is bit for bit not having stopped; see `read_state`
        for the random states on another number.

        Raises:
            FileNotFoundError: if there is no checkpoint.
            ValueError: if it lacks the file of a rank, or is of another model.
            OSError: on every rank, if one cannot read its part; build a new engine then. Or if the
                checkpoint that was being written in the background could not be.
        """
        require_on_device("FsdpEngine.load_checkpoint", self._parked)
        self._policy_version = self._state.load(folder, self._policy_version)
        self._drop_gradient()

    def save_pretrained(self, folder: Path) -> None:
        """Write a Hugging Face folder: weights, config, and the tokenizer files of the source.

        Raises:
            FileExistsError: if the folder exists.
        """
        write_pretrained(
            folder,
            self.export_weights(),
            source=Path(self._config.model_path),
            dtype_name=self._config.resolved_export_dtype,
        )

    def save_adapter(self, folder: Path) -> None:
        """Write the adapters alone, as peft and vLLM load them beside ``config.model_path``.

        Raises:
            RuntimeError: if there are none, or they are in host memory.
            FileExistsError: if the folder exists.
        """
        require_on_device("FsdpEngine.save_adapter", self._parked)
        self._require_adapters("save_adapter", "save_pretrained").save(
            folder, device=self._device, base=Path(self._config.model_path)
        )

    @torch.no_grad()
    def ref_logprobs(self, micro_batches: Sequence[BatchT]) -> list[Float[Tensor, " tokens"]]:
        """What `logprobs` returned at version 0: those of the model without its adapters.

        Raises:
            RuntimeError: if there are no adapters; an `FsdpScorer` is the reference then.
            ValueError: as `logprobs` does.
        """
        with self._require_adapters("ref_logprobs", "FsdpScorer.logprobs").switched_off():
            found = self._forward("ref_logprobs", micro_batches, with_entropies=False)
        return [statistics.logprobs for statistics in found]

    def to_host(self) -> None:
        """Free the device memory of weights and optimizer until `to_device`, for a sampler there.

        They wait in pinned host memory, as large as this rank's part; pinning it takes seconds the
        first time. Until `to_device` only properties may be asked for.

        Raises:
            RuntimeError: if they are in host memory, or if there is a gradient to step along.
            ValueError: if they are kept in host memory in any case: on a CPU, or offloaded.
        """
        require_parkable(
            "FsdpEngine.to_host", self._parked, self._device, offload=self._config.offload
        )
        if self._has_gradient:
            message = (
                "FsdpEngine.to_host: there is a gradient that no step was taken along; call "
                "optim_step first"
            )
            raise RuntimeError(message)
        tensors = (*self._model.parameters(), *self._optimizer.held())
        self._parked = park(tensors, self._device)

    def to_device(self) -> None:
        """Take weights and optimizer back.

        Raises:
            RuntimeError: if they are on the device.
        """
        unpark("FsdpEngine.to_device", self._parked)
        self._parked = None

    def _require_adapters(self, method: str, instead: str) -> Adapters:
        if self._adapters is None:
            message = (
                f"FsdpEngine.{method}: there are no adapters; set lora in the config, or call "
                f"{instead}"
            )
            raise RuntimeError(message)
        return self._adapters

    def _check(self, method: str, micro_batches: Sequence[TokenBatch]) -> None:
        """Refuse on all ranks what one of them would fail or wait at."""
        require_on_device(f"FsdpEngine.{method}", self._parked)
        self._roll_call.answer(method, policy_version=self._policy_version)
        check_together(method, micro_batches, vocab_size=self._vocab_size)
        check_shared(method, micro_batches, ulysses_size=self._config.parallel.ulysses_size)

    def _forward(
        self, method: str, micro_batches: Sequence[TokenBatch], *, with_entropies: bool
    ) -> list[TokenStatistics]:
        self._check(method, micro_batches)
        prepared = [self._policy.prepare(batch) for batch in micro_batches]
        try:
            return [
                self._policy.statistics(inputs, with_entropies=with_entropies)
                for inputs in prepared
            ]
        finally:
            self._policy.reshard()

    def _count_step(self, grad_norm: float) -> StepResult:
        self._policy_version = PolicyVersion(self._policy_version + 1)
        return StepResult(policy_version=self._policy_version, grad_norm=grad_norm)

    def _drop_gradient(self) -> None:
        self._optimizer.drop_gradients()
        self._has_gradient = False
        self._losses.clear()
        self._not_finite = ""
