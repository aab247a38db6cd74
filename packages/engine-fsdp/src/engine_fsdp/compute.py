"""The model of one rank as it runs: sharded, wrapped as configured, compared with the config."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from engine_fsdp.block_inputs import InputsOnHost
from engine_fsdp.config import FsdpConfig
from engine_fsdp.head import TokenStatistics
from engine_fsdp.inputs import ModelInputs, model_inputs
from engine_fsdp.model import PackedCausalLM
from engine_fsdp.sharding import num_ranks, shard
from parallel_state.mesh import Meshes
from parallel_state.ulysses import gather_rows
from rl_contracts.train import TokenBatch

DTYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""torch's types by the names that a config has for them."""


@final
class ShardedPolicy:
    """Computes log-probabilities with this rank's part of the weights."""

    def __init__(
        self,
        model: PackedCausalLM,
        *,
        config: FsdpConfig,
        device: torch.device,
        meshes: Meshes[Any],
    ) -> None:
        """Shard the model, wrap its blocks, and see that what runs is what was asked for.

        Args:
            model: loaded, whole, on the CPU; its parameters become shards on the device.
            config: how it computes.
            device: where.
            meshes: of the run.

        Raises:
            RuntimeError: if what runs is not as configured.
            ValueError: if the heads cannot be spread over ``parallel.ulysses_size`` ranks.
        """
        self._model = model
        model.kept_logits_bytes = int(config.kept_logits_gib * 2**30)
        self._config = config
        self._device = device
        self._dtype = DTYPES[config.compute_dtype]
        self._sharing = meshes.group("ulysses") if config.parallel.ulysses_size > 1 else None
        if self._sharing is not None:
            shape = model.model.config
            heads: int = shape.num_attention_heads
            config.parallel.check_model(
                num_attention_heads=heads,
                num_key_value_heads=getattr(shape, "num_key_value_heads", heads),
            )
        self._reshard = shard(
            model,
            mesh=meshes.fsdp,
            compute_dtype=self._dtype,
            num_shards=config.parallel.fsdp_size,
            offload=config.offload,
        )
        self._inputs = InputsOnHost() if config.offload_activations else None
        self._verify()
        # After it, since calls are not counted inside of compiled blocks.
        model.wrap_blocks(
            checkpointing=config.activation_checkpointing,
            compiled=config.compile_blocks,
            inputs=self._inputs,
        )

    def prepare(self, batch: TokenBatch) -> ModelInputs:
        """Move a micro-batch to the device, ahead of the work that is queued there."""
        return model_inputs(batch, device=self._device, dtype=self._dtype, group=self._sharing)

    def statistics(self, inputs: ModelInputs, *, with_entropies: bool = False) -> TokenStatistics:
        """Log-probability of every token in the loss mask, 0 elsewhere, for the whole micro-batch.

        Entropies too, without gradient, if asked for; they are empty otherwise. Collective.
        """
        found = self._model(
            inputs.token_ids,
            inputs.positions,
            inputs.rows,
            inputs.targets,
            inputs.packed,
            with_entropies=with_entropies,
        )
        logprobs = self._spread(found.logprobs, inputs)
        entropies = self._spread(found.entropies, inputs) if with_entropies else found.entropies
        return TokenStatistics(logprobs, entropies)

    def reshard(self) -> None:
        """Free gathered weights, see `shard`, and what a backward pass that failed left."""
        self._reshard()
        if self._inputs is not None:
            self._inputs.settle()

    def _spread(self, rows: Tensor, inputs: ModelInputs) -> Tensor:
        """Values of this rank's rows, to all tokens of the micro-batch."""
        if self._sharing is not None:
            rows = gather_rows(rows, inputs.row_counts, self._sharing)
        nothing = torch.zeros(inputs.num_tokens, dtype=rows.dtype, device=rows.device)
        return nothing.index_copy(0, inputs.scored, rows)

    @torch.no_grad()
    def _verify(self) -> None:
        """Compare what runs with what was asked for, in one forward pass of two sequences."""
        inputs = self.prepare(_two_sequences())
        logprobs = self.statistics(inputs).logprobs
        self.reshard()
        weights = list(self._model.model.parameters())
        home = "cpu" if self._config.offload == "parameters" else self._device.type
        checks: dict[str, tuple[object, object]] = {
            "compute_dtype": (frozenset((self._dtype,)), self._model.dtypes_seen),
            "calls of packed attention": (len(self._model.blocks), inputs.packed.num_calls),
            "type of the master weights": ({torch.float32}, {weight.dtype for weight in weights}),
            "device of the master weights": ({home}, {weight.device.type for weight in weights}),
            "ranks that a weight is spread over": (
                {dist.get_world_size()},
                {num_ranks(weight) for weight in weights},
            ),
            "finite log-probabilities": (True, bool(logprobs.isfinite().all())),
        }
        for what, (asked, got) in checks.items():
            if asked != got:
                message = f"FsdpEngine: {what}: asked for {asked}, what runs has {got}"
                raise RuntimeError(message)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class _Probe:
    """A micro-batch without anything to learn."""

    token_ids: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    loss_mask: Tensor

    def to(self, device: torch.device) -> "_Probe":
        return _Probe(
            token_ids=self.token_ids.to(device),
            positions=self.positions.to(device),
            cu_seqlens=self.cu_seqlens.to(device),
            loss_mask=self.loss_mask.to(device),
        )


def _two_sequences() -> TokenBatch:
    positions = torch.tensor([0, 1, 0, 1, 2])
    return _Probe(
        token_ids=positions,
        positions=positions,
        cu_seqlens=torch.tensor([0, 2, 5], dtype=torch.int32),
        loss_mask=positions > 0,
    )
