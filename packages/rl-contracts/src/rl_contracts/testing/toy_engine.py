"""An engine whose policy is a table: the logits of the next token given the present one."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import final

import torch
from jaxtyping import Float
from safetensors.torch import load_file, save_file
from torch import Tensor

from rl_contracts.batch_checks import inspect_batches, refuse_malformed
from rl_contracts.loss_tally import LossTally, total_of
from rl_contracts.rollout import PolicyVersion
from rl_contracts.train import BatchT, LossFn, NamedTensor, StepResult, TokenBatch

WEIGHT_NAME = "next_token_logits"


def toy_weights(vocab_size: int, *, seed: int = 0) -> Float[Tensor, "vocab vocab"]:
    """The table that a toy engine and a toy sampler begin with: small normal logits."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(vocab_size, vocab_size, generator=generator)


def table_logprobs(
    table: Float[Tensor, "vocab vocab"], batch: TokenBatch
) -> Float[Tensor, " tokens"]:
    """Log-probability of each token given the one before it; 0 outside the loss mask."""
    previous = batch.token_ids.roll(1)
    all_logprobs = torch.log_softmax(table.float()[previous], dim=-1)
    token_logprobs = all_logprobs.gather(-1, batch.token_ids[:, None]).squeeze(-1)
    return torch.where(batch.loss_mask, token_logprobs, 0.0)


@final
class ToyEngine:
    """A `TrainEngine` and `Checkpointable` of one rank with plain gradient descent.

    Args:
        vocab_size: number of tokens.
        learning_rate: step size of the descent.
        max_grad_norm: the gradient is scaled down to this L2 norm.
        seed: of the first table.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        learning_rate: float = 0.5,
        max_grad_norm: float = 1e9,
        seed: int = 0,
    ) -> None:
        self._table = toy_weights(vocab_size, seed=seed).requires_grad_()
        self._learning_rate = learning_rate
        self._max_grad_norm = max_grad_norm
        self._version = PolicyVersion(0)

    @property
    def policy_version(self) -> PolicyVersion:
        """Optimizer steps behind the present weights."""
        return self._version

    def logprobs(self, micro_batches: Sequence[BatchT]) -> list[Float[Tensor, " tokens"]]:
        """See `TrainEngine.logprobs`."""
        self._check("logprobs", micro_batches)
        with torch.no_grad():
            return [table_logprobs(self._table, batch) for batch in micro_batches]

    def forward_backward(
        self, micro_batches: Sequence[BatchT], loss_fn: LossFn[BatchT]
    ) -> dict[str, float]:
        """See `TrainEngine.forward_backward`."""
        tally = LossTally()
        try:
            self._check("forward_backward", micro_batches)
            for batch in micro_batches:
                policy_logprobs = table_logprobs(self._table, batch)
                output = loss_fn(policy_logprobs, batch)
                torch.autograd.backward(tally.add(output, batch, policy_logprobs))
            return total_of([tally.report()], policy_version=self._version)
        except BaseException:
            self._table.grad = None
            raise

    def optim_step(self) -> StepResult:
        """See `TrainEngine.optim_step`."""
        gradient = self._table.grad
        if gradient is None:
            gradient = torch.zeros_like(self._table)
        norm = torch.linalg.vector_norm(gradient).item()
        self._table.grad = None
        if not torch.isfinite(gradient).all():
            raise FloatingPointError(
                f"expected a finite gradient, got norm {norm}; the weights stay as they are"
            )
        scale = min(1.0, self._max_grad_norm / max(norm, 1e-12))
        with torch.no_grad():
            self._table -= self._learning_rate * scale * gradient
        self._version = PolicyVersion(self._version + 1)
        return StepResult(policy_version=self._version, grad_norm=norm)

    def _check(self, method: str, micro_batches: Sequence[TokenBatch]) -> None:
        report = inspect_batches(micro_batches, vocab_size=self._table.shape[0])
        refuse_malformed(method, [report])

    def export_weights(self) -> Iterator[NamedTensor]:
        """See `TrainEngine.export_weights`."""
        yield NamedTensor(WEIGHT_NAME, self._table.detach().clone())

    def save_checkpoint(self, folder: Path) -> None:
        """Write the table and the version into a new folder."""
        folder.mkdir(parents=True)
        save_file({WEIGHT_NAME: self._table.detach()}, folder / "weights.safetensors")
        (folder / "state.json").write_text(json.dumps({"policy_version": self._version}))

    def load_checkpoint(self, folder: Path) -> None:
        """Take both back."""
        table = load_file(folder / "weights.safetensors")[WEIGHT_NAME]
        state = json.loads((folder / "state.json").read_text())
        if table.shape != self._table.shape:
            raise ValueError(
                f"expected a table of shape {tuple(self._table.shape)}, "
                f"got {tuple(table.shape)} from {folder}"
            )
        with torch.no_grad():
            self._table.copy_(table)
        self._table.grad = None
        self._version = PolicyVersion(int(state["policy_version"]))
