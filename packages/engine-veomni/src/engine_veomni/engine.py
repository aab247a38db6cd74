"""The engine: VeOmni's model and optimizer behind the `TrainEngine` contract."""

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from engine_veomni import checkpoint
from engine_veomni.build import ExpertSharding, build_optimizers
from engine_veomni.config import VeomniConfig
from engine_veomni.export import export_weights
from engine_veomni.hf_layout import stacked_parameters
from engine_veomni.loss_agreement import AgreedLoss, for_loss
from engine_veomni.quiet import quiet
from engine_veomni.routing import Purpose, Router, RouterStatistics
from engine_veomni.sampler_routes import RouterShape
from engine_veomni.sharded_policy import ShardedPolicy
from engine_veomni.veomni_state import VeomniState
from parallel_state.collectives import ShardedParameters, clip_grads_, global_grad_norm
from parallel_state.parking import (
    Parked,
    held_by,
    park,
    require_on_device,
    require_parkable,
    unpark,
)
from rl_contracts.batch_checks import check_shared, check_together
from rl_contracts.pretrained import write_pretrained
from rl_contracts.rollout import PolicyVersion
from rl_contracts.train import BatchT, LossFn, NamedTensor, StepResult, TokenBatch


@final
class VeomniEngine:
    """Trains a mixture of experts through VeOmni; a `TrainEngine` and `Checkpointable`.

    Every rank of the world holds one, and every method is called on all of them in the same
    order. VeOmni changes transformers for the whole process (its loss functions return tuples
    afterwards): keep this engine in a process of its own, away from other users of transformers.
    """

    def __init__(self, config: VeomniConfig, *, device: torch.device) -> None:
        """Build the model and the optimizer; torch.distributed must be initialised.

        Args:
            config: what to train and how.
            device: where this rank computes; on CUDA it becomes the process's current device.

        Raises:
            ValueError: for a VeOmni that was not tested, a model, a folder or degrees that cannot
                be trained as configured, or a device that this process cannot use.
            RuntimeError: if the experts did not end up where the degrees say.
        """
        self._policy = ShardedPolicy(config, device=device)
        with quiet(logging.INFO), self._policy.state.entered():
            # both before any forward pass: they read the mesh of each parameter
            self._parts = _parts(self._policy.model, self._policy.state)
            self._optimizers = build_optimizers(self._policy.model, config)
        self._config = config
        self._device = device
        self._router = _router(config, self._policy.routers, device)
        self._parked: Parked | None = None
        self._policy_version = PolicyVersion(0)
        self._has_gradient = False

    @property
    def config(self) -> VeomniConfig:
        """What it was built from."""
        return self._config

    @property
    def policy_version(self) -> PolicyVersion:
        """Optimizer steps behind the present weights."""
        return self._policy_version

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next `optim_step`."""
        return self._config.optim.learning_rate_at(self._policy_version)

    @property
    def expert_sharding(self) -> ExpertSharding:
        """Where the experts of a layer are, as read from the running model."""
        return self._policy.expert_sharding

    @property
    def derived(self) -> dict[str, tuple[object, str]]:
        """What runs without having been set: name to (value, why), for the effective config."""
        sharding, kernels = self.expert_sharding, self._policy.kernels.names
        why = "read from the running model"
        found: dict[str, tuple[object, str]] = {
            "engine.num_experts": (sharding.num_experts, why),
            "engine.num_local_experts": (sharding.num_local_experts, why),
            "engine.ep_size": (sharding.ep_size, "size of this rank's process group"),
            "engine.veomni": (self._policy.veomni_version, "the installed release"),
        }
        for op_name, kernel in kernels.items():
            found[f"engine.kernel.{op_name}"] = (kernel, "bound in VeOmni's model")
        return found

    def logprobs(self, micro_batches: Sequence[BatchT]) -> list[Float[Tensor, " tokens"]]:
        """Log-probabilities of the given tokens under the present weights, without gradient.

        Raises:
            ValueError: on every rank, if the ranks were given different numbers of micro-batches,
                or one of them is malformed, or lacks the sampler's routes that are to be replayed.
            RuntimeError: while the weights are in host memory; see `to_host`.
        """
        self._check("logprobs", micro_batches)
        if self._router is not None:
            self._router.begin_scoring(micro_batches)
        return self._scored(micro_batches, purpose="score")

    def forward_backward(
        self, micro_batches: Sequence[BatchT], loss_fn: LossFn[BatchT]
    ) -> dict[str, float]:
        """Add the gradient of the loss, summed over micro-batches and ranks, to what is there.

        A `PackedBatch` comes to `loss_fn` without its `images` and `routed_experts`.
        With ``config.router_aux_loss_coef`` the balancing loss of all these micro-batches is added
        for the gradient, and reported beside the loss as ``loss/router_aux/mean``.

        Raises:
            ValueError: on every rank, if the ranks were given different numbers of micro-batches,
                one of them is malformed or lacks routes that are to be replayed, `loss_fn` returned
                other metrics for one of them than for another, or a loss without gradient for one
                that has tokens in its loss mask.
            FloatingPointError: on every rank, if the loss of a micro-batch is not finite; names its
                trajectories. The gradient is dropped, the weights stay as they are.
            RuntimeError: if `loss_fn` raised on another rank, with what it said there. On its own
                rank its own error is raised. Or while the weights are in host memory.
        """
        agreed = AgreedLoss(loss_fn)
        with self._dropping_gradient_on_error():
            self._check("forward_backward", micro_batches)
            if self._router is not None:
                self._router.start(micro_batches)
                if self._router.needs_counting:
                    self._scored(micro_batches, purpose="count")
                    self._router.end_counting()
            coefficient = self._config.router_aux_loss_coef
            for batch in micro_batches:
                with self._entered(batch, purpose="train"):
                    policy_logprobs = self._policy.logprobs(batch)
                    loss = agreed(policy_logprobs, for_loss(batch).to(self._device))
                    if coefficient and self._router is not None:
                        loss = loss + coefficient * self._router.balancing_share()
                    # FSDP divides by the number of ranks, and the contract wants a sum
                    (loss * self._config.parallel.data_size).backward()
            totals = agreed.sum_over_ranks(policy_version=self._policy_version)
        self._has_gradient = True
        # ranks that share their sequences each computed the whole loss of them
        ulysses_size = self._config.parallel.ulysses_size
        found = {name: total / ulysses_size for name, total in totals.items()}
        if coefficient and self._router is not None:
            found["loss/router_aux/mean"] = self._router.balancing_loss()
        return found

    def router_statistics(self) -> RouterStatistics:
        """How the tokens of the last `forward_backward` were routed; called on all ranks.

        Raises:
            RuntimeError: if ``config.router_statistics`` is off, or nothing was counted yet.
        """
        if self._router is None or not self._config.router_statistics:
            message = "router_statistics: set router_statistics to true in the VeomniConfig"
            raise RuntimeError(message)
        return self._router.statistics()

    def optim_step(self) -> StepResult:
        """Clip, step, clear the gradient, and raise the policy version by one.

        Raises:
            RuntimeError: if there is no gradient, or if the schedule has come to an end at a
                learning rate of 0, where a step would change no weight.
            FloatingPointError: if the gradient is not finite; it is dropped, and the weights stay
                as they are.
        """
        require_on_device("VeomniEngine.optim_step", self._parked)
        if not self._has_gradient:
            message = "optim_step: there is no gradient; call forward_backward first"
            raise RuntimeError(message)
        if self.learning_rate == 0.0:
            message = (
                f"optim_step: the learning rate of step {self._policy_version} is 0, so no weight "
                "would change; give optim.total_steps or optim.final_learning_rate another value"
            )
            raise RuntimeError(message)
        norm = global_grad_norm(self._parts, device=self._device)
        grad_norm = norm.item()
        if not math.isfinite(grad_norm):
            self._drop_gradient()
            message = (
                f"optim_step: the gradient's norm is {grad_norm} at policy version "
                f"{self._policy_version}; the gradient was dropped"
            )
            raise FloatingPointError(message)
        if self._config.optim.max_grad_norm is not None:
            clip_grads_(self._parts, norm=norm, max_norm=self._config.optim.max_grad_norm)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.learning_rate
            optimizer.step()
        self._drop_gradient()
        self._policy_version = PolicyVersion(self._policy_version + 1)
        return StepResult(policy_version=self._policy_version, grad_norm=grad_norm)

    def export_weights(self) -> Iterator[NamedTensor]:
        """All weights as the folder names and lays them out, in `export_dtype`.

        Every yielded tensor is the caller's own: nobody writes to it. The experts of a layer are
        views of one stack, whose memory is free when none of them is held; clone one that is to be
        kept alone. Every rank must run the iterator to its end.
        """
        require_on_device("VeomniEngine.export_weights", self._parked)
        return export_weights(
            self._policy.model,
            self._policy.state,
            device=self._device,
            dtype=getattr(torch, self._config.resolved_export_dtype),
            max_bytes=self._config.export_max_bytes,
        )

    def save_checkpoint(self, folder: Path) -> None:
        """Write everything that a bit-identical resume needs into a new folder.

        Raises:
            FileExistsError: if the folder exists.
        """
        require_on_device("VeomniEngine.save_checkpoint", self._parked)
        checkpoint.save_checkpoint(
            folder,
            self._policy.model,
            self._optimizers,
            parallel=self._config.parallel,
            policy_version=self._policy_version,
        )

    def load_checkpoint(self, folder: Path) -> None:
        """Take all of it back; a gradient that is there is dropped.

        Raises:
            ValueError: if the folder was written with other degrees or for another model.
        """
        require_on_device("VeomniEngine.load_checkpoint", self._parked)
        self._policy_version = checkpoint.load_checkpoint(
            folder, self._policy.model, self._optimizers, parallel=self._config.parallel
        )
        self._drop_gradient()

    def save_pretrained(self, folder: Path) -> None:
        """Write a new Hugging Face folder: weights in `export_dtype`, configuration, tokenizer.

        Raises:
            FileExistsError: if the folder exists.
        """
        write_pretrained(
            folder,
            self.export_weights(),
            source=Path(self._config.model_path),
            dtype_name=self._config.resolved_export_dtype,
        )

    def to_host(self) -> None:
        """Free the device memory of weights and optimizer until `to_device`, for a sampler there.

        They wait in pinned host memory, as large as this rank's part, and routes that are to be
        replayed with them; pinning it takes seconds the first time. Until `to_device` only
        properties may be asked for.

        Raises:
            RuntimeError: if they are in host memory, or if there is a gradient to step along.
            ValueError: if they are kept in host memory in any case: on a CPU, or offloaded.
        """
        require_parkable(
            "VeomniEngine.to_host", self._parked, self._device, offload=self._config.offload
        )
        if self._has_gradient:
            message = (
                "VeomniEngine.to_host: there is a gradient that no step was taken along; call "
                "optim_step first"
            )
            raise RuntimeError(message)
        self._park()

    def to_device(self) -> None:
        """Take weights and optimizer back.

        Raises:
            RuntimeError: if they are on the device.
        """
        unpark("VeomniEngine.to_device", self._parked)
        self._parked = None

    def _park(self) -> None:
        """Give the memory away, without a question whether that is of use."""
        routes = () if self._router is None else self._router.held
        held = chain(held_by(self._policy.model, self._optimizers), routes)
        self._parked = park(held, self._device)

    def _check(self, method: str, micro_batches: Sequence[TokenBatch]) -> None:
        """Refuse malformed micro-batches, on all ranks."""
        require_on_device(f"VeomniEngine.{method}", self._parked)
        check_together(
            method,
            micro_batches,
            vocab_size=self._policy.vocab_size,
            check_images=self._policy.image_check,
        )
        check_shared(method, micro_batches, ulysses_size=self._config.parallel.ulysses_size)

    @torch.no_grad()
    def _scored(
        self, micro_batches: Sequence[BatchT], *, purpose: Purpose
    ) -> list[Float[Tensor, " tokens"]]:
        """Log-probabilities from a pass without gradient."""
        try:
            found = []
            for batch in micro_batches:
                with self._entered(batch, purpose=purpose):
                    found.append(self._policy.logprobs(batch))
            return found
        finally:
            self._policy.reshard()

    @contextmanager
    def _entered(self, batch: TokenBatch, *, purpose: Purpose) -> Iterator[None]:
        """VeOmni's code sees this engine's parallel state, kernels and router."""
        with self._policy.entered():
            if self._router is None:
                yield
            else:
                with self._router.watching(batch, purpose=purpose):
                    yield

    @contextmanager
    def _dropping_gradient_on_error(self) -> Iterator[None]:
        done = False
        try:
            yield
            done = True
        finally:
            if not done:
                self._drop_gradient()
                self._policy.reshard()

    def _drop_gradient(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        self._has_gradient = False


def _router(config: VeomniConfig, shape: RouterShape | None, device: torch.device) -> Router | None:
    """Answers VeOmni's routers, if a setting wants something of them."""
    balances = config.router_aux_loss_coef > 0.0
    if shape is None or not (
        balances or config.router_statistics or config.router_replay != "none"
    ):
        return None
    return Router(
        shape,
        replay=config.router_replay,
        counts=config.router_statistics,
        balances=balances,
        device=device,
    )


def _parts(model: torch.nn.Module, state: VeomniState) -> tuple[ShardedParameters, ...]:
    """Parameters by the groups whose ranks hold other pieces of them, beyond their shards."""
    stacks = set(stacked_parameters(model)) if state.ep_group is not None else set()
    named = list(model.named_parameters())
    dense = ShardedParameters(parameters=[each for name, each in named if name not in stacks])
    if state.ep_group is None:
        return (dense,)
    experts = [each for name, each in named if name in stacks]
    return (dense, ShardedParameters(parameters=experts, groups=(state.ep_group,)))
