"""A Hugging Face causal LM that answers with the log-probabilities of a packed micro-batch."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from engine_fsdp.attention import ATTENTION_NAME, PackedSequences, register_attention
from engine_fsdp.head import linear_logprobs

_PROBE_LENGTHS = (2, 5, 3)
"""Sequences of the comparison at load; lengths that differ, so that filling takes part."""

_PROBE_TOLERANCE = 1e-3
"""Nats. Two float32 orders of summation differ by about 1e-5, another formula by far more."""


@final
class PackedCausalLM(nn.Module):
    """Body and head of a causal LM as one forward pass, which FSDP2 wraps as its root.

    The head's weight is used inside this forward, where FSDP2 has gathered it.
    """

    def __init__(self, model: nn.Module, *, temperature: float) -> None:
        super().__init__()
        self.model: Any = model  # transformers types little of what a model offers
        self.temperature = temperature
        self.dtypes_seen: frozenset[torch.dtype] = frozenset()
        """Types of head weight and hidden states in the last forward pass."""

        # Found by class name, as transformers' own FSDP support does; FSDP2 renames the classes.
        names = frozenset[str](getattr(model, "_no_split_modules", None) or ())
        self.blocks = tuple(
            module for module in self.model.modules() if type(module).__name__ in names
        )
        """The decoder blocks, first to last."""

    def forward(
        self,
        token_ids: Int[Tensor, " tokens"],
        positions: Int[Tensor, " tokens"],
        scored: Int[Tensor, " scored"],
        packed: PackedSequences,
    ) -> Float[Tensor, " tokens"]:
        """Log-probability of the tokens at `scored` given those before them; 0 elsewhere."""
        output = self.model.base_model(
            input_ids=token_ids[None], position_ids=positions[None], use_cache=False, packed=packed
        )
        # The token before predicts the token; no other token pays for the head.
        hidden = output.last_hidden_state[0][scored - 1]
        weight = self.model.get_output_embeddings().weight
        self.dtypes_seen = frozenset((hidden.dtype, weight.dtype))
        logprobs = linear_logprobs(hidden, weight, token_ids[scored], temperature=self.temperature)
        return torch.zeros_like(token_ids, dtype=torch.float32).index_copy(0, scored, logprobs)

    def checkpoint_activations(self) -> None:
        """Recompute each block in the backward pass. Call before `fully_shard`."""
        for block in self.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """All that belongs into a Hugging Face checkpoint; a tied weight once."""
        yield from self.model.named_parameters()
        saved = self.model.state_dict().keys()
        yield from ((name, buffer) for name, buffer in self.model.named_buffers() if name in saved)


def load_model(folder: Path, *, temperature: float) -> PackedCausalLM:
    """Load a Hugging Face folder in float32 on the CPU, and see that it computes what it should.

    Packed log-probabilities are compared with the model's own eager forward pass, one sequence at a
    time: a model whose head or attention does more than this package does is found here.

    Raises:
        FileNotFoundError: if the folder holds no config.json or no safetensors weights.
        ValueError: if weights are missing, left over or of another shape, or if the model is of a
            kind that packed training would compute wrongly.
    """
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        message = (
            f"{folder}: expected a Hugging Face folder with config.json and *.safetensors; "
            "download or convert the model first"
        )
        raise FileNotFoundError(message)
    from transformers import AutoModelForCausalLM  # noqa: PLC0415  # heavy, and only for users

    register_attention()
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        output_loading_info=True,
    )
    model, report = loaded
    wrong = {kind: sorted(map(str, names)) for kind, names in report.items() if names}
    if wrong:
        message = (
            f"{folder}: the weights do not fit {type(model).__name__}, which would leave some of "
            f"it random: {wrong}"
        )
        raise ValueError(message)
    model.eval()  # dropout off, for good: logprobs must depend on weights and tokens alone
    packed_model = PackedCausalLM(model, temperature=temperature)
    _check_kind(packed_model, folder)
    _check_names(packed_model, folder)
    _compare_with_eager(packed_model, folder)
    return packed_model


def _check_kind(packed_model: PackedCausalLM, folder: Path) -> None:
    model = packed_model.model
    kind = type(model).__name__
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.bias is not None:
        message = f"{folder}: expected an output projection without bias in {kind}, got {head}"
        raise ValueError(message)
    if not packed_model.blocks:
        message = f"{folder}: {kind} does not name its blocks in _no_split_modules"
        raise ValueError(message)
    layer_types = set(getattr(model.config, "layer_types", None) or ())
    if others := layer_types - {"full_attention"}:
        message = (
            f"{folder}: {kind} has layers of type {', '.join(sorted(others))}; engine-fsdp trains "
            "models whose every layer is full attention"
        )
        raise ValueError(message)
    other_dtypes = {
        name for name, value in packed_model.named_weights() if not value.is_floating_point()
    }
    if other_dtypes:
        message = f"{folder}: {kind} has weights that are no floating-point numbers: {other_dtypes}"
        raise ValueError(message)


def _check_names(packed_model: PackedCausalLM, folder: Path) -> None:
    """The export goes by the names in the folder; some models are converted while loading."""
    from safetensors import safe_open  # noqa: PLC0415

    stored: set[str] = set()
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            stored.update(tensors.keys())
    if unknown := {name for name, _ in packed_model.named_weights()} - stored:
        message = (
            f"{folder}: transformers renames weights of {type(packed_model.model).__name__} while "
            f"loading, so that they cannot be exported under their stored names: "
            f"{sorted(unknown)[:3]} and others are not in the folder"
        )
        raise ValueError(message)


@torch.no_grad()
def _compare_with_eager(packed_model: PackedCausalLM, folder: Path) -> None:
    model = packed_model.model
    vocab_size = model.get_input_embeddings().num_embeddings
    rows = _probe_rows(_PROBE_LENGTHS, vocab_size)
    expected = []
    for row in rows:
        logits = model(input_ids=row[None], use_cache=False).logits[0, :-1]
        log_p = (logits.float() / packed_model.temperature).log_softmax(-1)
        expected.append(log_p.gather(1, row[1:, None])[:, 0])
    model.set_attn_implementation(ATTENTION_NAME)
    got = packed_model(*pack_rows(rows))
    scored = torch.cat([torch.arange(len(row)) > 0 for row in rows])
    difference = (got[scored] - torch.cat(expected)).abs().max().item()
    if not difference <= _PROBE_TOLERANCE:
        message = (
            f"{folder}: packed log-probabilities of {type(model).__name__} differ by up to "
            f"{difference:.3g} nats from its own eager forward pass (allowed {_PROBE_TOLERANCE}); "
            "its attention or head does something that engine-fsdp does not know"
        )
        raise ValueError(message)


def _probe_rows(lengths: Sequence[int], vocab_size: int) -> list[Tensor]:
    """Fixed token ids spread over the vocabulary."""
    return [
        torch.arange(1, length + 1) * (7919 + index) % vocab_size
        for index, length in enumerate(lengths)
    ]


def pack_rows(
    rows: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor, PackedSequences]:
    """Arguments of `PackedCausalLM.forward` that score every token but the first of each row."""
    lengths = torch.tensor([0, *(len(row) for row in rows)])
    positions = torch.cat([torch.arange(len(row)) for row in rows])
    layout = PackedSequences.of(lengths.cumsum(0), torch.device("cpu"))
    return torch.cat(list(rows)), positions, positions.nonzero()[:, 0], layout
