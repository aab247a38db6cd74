"""The engine: FSDP2 around a packed causal LM, one optimizer, and what may be asked of both."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import final

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from engine_fsdp.attention import PackedSequences
from engine_fsdp.checkpoint import (
    random_states,
    read_tensors,
    restore_random_states,
    write_tensors,
)
from engine_fsdp.config import FsdpConfig
from engine_fsdp.model import load_model
from engine_fsdp.sharding import local, num_ranks, shard, whole
from parallel_state.mesh import build_meshes
from rl_contracts.batch_checks import check_together
from rl_contracts.expert_layout import split_stack
from rl_contracts.loss_tally import LossTally
from rl_contracts.pretrained import write_pretrained
from rl_contracts.rollout import PolicyVersion
from rl_contracts.train import BatchT, LossFn, NamedTensor, StepResult, TokenBatch

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


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
            device: where this rank computes; the process group's backend must serve it.

        Raises:
            RuntimeError: if torch.distributed is not initialised (see
                `parallel_state.process_group.init_process_group`), or if
                the running model is not as configured.
            ValueError: for a device that has no packed attention here, a world that
                ``config.parallel`` does not fill, or weights that do not fit (see `load_model`).
            FileNotFoundError: if the folder lacks config.json or the weights.
        """
        if device.type != "cpu":
            message = (
                f"FsdpEngine: expected a CPU device, got {device}; packed attention is implemented "
                "for CPUs only"
            )
            raise ValueError(message)
        if not dist.is_initialized():
            message = (
                "FsdpEngine: torch.distributed is not initialised; call "
                "parallel_state.process_group.init_process_group() first, also for one process"
            )
            raise RuntimeError(message)
        self._config = config
        self._device = device
        mesh = build_meshes(config.parallel, device.type).fsdp
        self._model = load_model(Path(config.model_path), temperature=config.temperature)
        if config.activation_checkpointing:
            self._model.checkpoint_activations()
        self._reshard = shard(
            self._model,
            mesh=mesh,
            compute_dtype=_DTYPES[config.compute_dtype],
            num_shards=config.parallel.dp_shard_size,
        )
        self._parameters = dict(self._model.model.named_parameters())
        self._optimizer = torch.optim.AdamW(
            self._parameters.values(),
            lr=config.optim.learning_rate,
            betas=config.optim.betas,
            eps=config.optim.eps,
            weight_decay=config.optim.weight_decay,
            fused=True,
        )
        self._vocab_size: int = self._model.model.get_input_embeddings().num_embeddings
        self._policy_version = PolicyVersion(0)
        self._has_gradient = False
        self._verify()

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
        check_together("logprobs", micro_batches, vocab_size=self._vocab_size)
        try:
            return [self._forward(batch) for batch in micro_batches]
        finally:
            self._reshard()

    def forward_backward(
        self, micro_batches: Sequence[BatchT], loss_fn: LossFn[BatchT]
    ) -> dict[str, float]:
        """Add the gradient of the loss, summed over micro-batches and ranks, to what is there.

        Raises:
            ValueError: on every rank, if the ranks were given different numbers of micro-batches,
                one of them is malformed, `loss_fn` returned other metrics for one of them than for
                another, or a loss without gradient for one that has tokens in its loss mask.
            FloatingPointError: on every rank, if the loss of a micro-batch is not finite; names its
                trajectories.
        """
        tally = LossTally()
        is_whole = False
        try:
            check_together("forward_backward", micro_batches, vocab_size=self._vocab_size)
            for batch in micro_batches:
                policy_logprobs = self._forward(batch)
                output = loss_fn(policy_logprobs, batch.to(self._device))
                tally.add(output, batch, policy_logprobs).backward()
            totals = tally.sum_over_ranks(policy_version=self._policy_version)
            is_whole = True
        finally:
            self._reshard()
            if not is_whole:
                self._drop_gradient()
        self._has_gradient = True
        return totals

    def optim_step(self) -> StepResult:
        """Clip, step, clear the gradient, and raise the policy version by one.

        Raises:
            RuntimeError: if there is no gradient to step along.
            FloatingPointError: if the gradient is not finite; the weights stay as they are.
        """
        if not self._has_gradient:
            message = (
                f"optim_step: there is no gradient at policy version {self._policy_version}; call "
                "forward_backward first (a failed one leaves none)"
            )
            raise RuntimeError(message)
        gradients = [
            parameter.grad for parameter in self._parameters.values() if parameter.grad is not None
        ]
        total_norm = whole(get_total_norm(gradients))
        grad_norm = total_norm.item()
        if not math.isfinite(grad_norm):
            self._drop_gradient()
            message = (
                f"optim_step: the gradient's norm is {grad_norm} at policy version "
                f"{self._policy_version}; the gradient was dropped and no weight changed"
            )
            raise FloatingPointError(message)
        max_norm = self._config.optim.max_grad_norm
        if max_norm is not None:
            clip_grads_with_norm_(self._parameters.values(), max_norm, total_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = self.learning_rate
        self._optimizer.step()
        self._drop_gradient()
        self._policy_version = PolicyVersion(self._policy_version + 1)
        return StepResult(policy_version=self._policy_version, grad_norm=grad_norm)

    @torch.no_grad()
    def export_weights(self) -> Iterator[NamedTensor]:
        """All weights under their names in the folder, whole, in the type ``config.export_dtype``.

        A weight that the model ties to another is yielded once, under the other's name. Experts
        that the folder holds one by one are yielded so; those of one layer and projection are then
        in memory twice. Every rank must run the iterator to its end.
        """
        dtype = _DTYPES[self._config.resolved_export_dtype]
        for name, weight in self._model.named_weights():
            gathered = whole(weight.detach().to(dtype))
            if name in self._model.stacks:
                yield from split_stack(name, gathered)
                continue
            held = local(weight).untyped_storage().data_ptr()
            is_own = gathered.untyped_storage().data_ptr() != held
            yield NamedTensor(name, gathered if is_own else gathered.clone())

    def save_checkpoint(self, folder: Path) -> None:
        """Write weights, optimizer, schedule, random states and version into a new folder.

        The folder appears whole, by one rename. The schedule is a function of the version.

        Raises:
            FileExistsError: if the folder exists.
            OSError: on every rank, if one cannot write its part; no folder appears.
        """
        write_tensors({**self._state(), **random_states(self._device)}, folder)

    def load_checkpoint(self, folder: Path) -> None:
        """Take all of it back; the gradient added up so far is dropped.

        Raises:
            FileNotFoundError: if there is no checkpoint.
            ValueError: if it was written by another number of ranks or for another model.
            OSError: on every rank, if one cannot read its part; build a new engine then.
        """
        state = {**self._state(), **random_states(self._device)}
        read_tensors(state, folder)
        restore_random_states(state, self._device)
        self._policy_version = PolicyVersion(int(state["policy_version"].item()))
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

    def _forward(self, batch: TokenBatch) -> Float[Tensor, " tokens"]:
        scored = batch.loss_mask.nonzero()[:, 0]
        logprobs: Tensor = self._model(
            batch.token_ids.to(self._device),
            batch.positions.to(self._device),
            scored.to(self._device),
            PackedSequences.of(batch.cu_seqlens, self._device),
        )
        return logprobs

    def _drop_gradient(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        self._has_gradient = False

    def _state(self) -> dict[str, Tensor]:
        """Everything but the random states, as tensors that are read into in place."""
        state: dict[str, Tensor] = {
            "policy_version": torch.tensor([self._policy_version], dtype=torch.int64),
            "world_size": torch.tensor([dist.get_world_size()], dtype=torch.int64),
        }
        for name, parameter in self._parameters.items():
            moments = self._optimizer.state[parameter]
            if not moments:  # what AdamW starts from
                moments["step"] = torch.zeros((), dtype=torch.float32, device=self._device)
                moments["exp_avg"] = torch.zeros_like(parameter)
                moments["exp_avg_sq"] = torch.zeros_like(parameter)
            state[f"optim.step.{name}"] = moments["step"].view(1)
            state[f"optim.exp_avg.{name}"] = moments["exp_avg"]
            state[f"optim.exp_avg_sq.{name}"] = moments["exp_avg_sq"]
        for name, weight in self._model.named_weights():
            state[f"model.{name}"] = weight.detach()
        return state

    @torch.no_grad()
    def _verify(self) -> None:
        """Compare what runs with what was asked for, in one forward pass of two sequences."""
        dtype = _DTYPES[self._config.compute_dtype]
        packed = PackedSequences.of(torch.tensor([0, 2, 5]), self._device)
        ids = torch.tensor([0, 1, 0, 1, 2], device=self._device)
        positions = torch.tensor([0, 1, 0, 1, 2], device=self._device)
        logprobs = self._model(ids, positions, torch.tensor([1, 3, 4], device=self._device), packed)
        self._reshard()
        num_blocks = len(self._model.blocks)
        checks: dict[str, tuple[object, object]] = {
            "compute_dtype": (frozenset((dtype,)), self._model.dtypes_seen),
            "calls of packed attention": (num_blocks, packed.num_calls),
            "type of the master weights": (
                {torch.float32},
                {parameter.dtype for parameter in self._parameters.values()},
            ),
            "ranks that a weight is spread over": (
                {self._config.parallel.world_size},
                {num_ranks(weight) for weight in self._parameters.values()},
            ),
            "finite log-probabilities": (True, bool(logprobs.isfinite().all())),
        }
        for what, (asked, got) in checks.items():
            if asked != got:
                message = f"FsdpEngine: {what}: asked for {asked}, what runs has {got}"
                raise RuntimeError(message)
