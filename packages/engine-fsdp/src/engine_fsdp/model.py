"""A Hugging Face causal LM that answers with the log-probabilities of a packed micro-batch."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from engine_fsdp.attention import ATTENTION_NAME, PackedSequences, lay_out, register_attention
from engine_fsdp.block_inputs import InputsOnHost
from engine_fsdp.blocks import wrap_block
from engine_fsdp.config import ActivationCheckpointing
from engine_fsdp.head import TokenStatistics, linear_logprobs, linear_statistics
from rl_contracts.expert_layout import is_stack, view_stack
from rl_contracts.pretrained import folder_shapes
from rl_contracts.train import NamedTensor

EXPERTS_NAME = "grouped_mm"
"""transformers' own implementation of the experts that this engine runs: one grouped product per
projection, on CPUs and GPUs (transformers 5.19, integrations/moe.py)."""

_SIZE_STEP = 8
"""Numbers in 16 bytes of bfloat16, to which `torch.nn.functional.grouped_mm` wants rows aligned."""

_PROBE_LENGTHS = (2, 5, 3)
"""Sequences of the comparison at load; lengths that differ, so that filling takes part."""

_PROBE_TOLERANCE = 1e-3
"""Nats. Two float32 orders of summation differ by about 1e-5, another formula by far more."""

_NUM_PROBES = 3
"""Comparisons of a model with experts, of which one must agree: where two experts are as good as
equal for a token, another order of summation may choose the other one, and both are right."""


@final
class PackedCausalLM(nn.Module):
    """Body and head of a causal LM as one forward pass, which FSDP2 wraps as its root.

    The head's weight is used inside this forward, where FSDP2 has gathered it.
    """

    def __init__(
        self, model: nn.Module, *, temperature: float, stacks: frozenset[str] = frozenset()
    ) -> None:
        super().__init__()
        self.model: Any = model  # transformers types little of what a model offers
        self.temperature = temperature
        self.kept_logits_bytes = 0
        """The most logits that are kept for the backward pass."""
        self.stacks = stacks
        """Names of the weights that the folder holds as one tensor per expert and projection."""
        self.has_experts = any(is_stack(name) for name, _ in self.model.named_parameters())
        """Whether any layer is a mixture of experts."""
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
        rows: Int[Tensor, " rows"],
        targets: Int[Tensor, " rows"],
        packed: PackedSequences,
        *,
        with_entropies: bool = False,
    ) -> TokenStatistics:
        """Log-probability of each target, predicted by the token at its row.

        Entropies too, without gradient, if asked for; they are empty otherwise.
        """
        output = self.model.base_model(
            input_ids=token_ids[None], position_ids=positions[None], use_cache=False, packed=packed
        )
        hidden = output.last_hidden_state[0].index_select(0, rows)
        weight = self.model.get_output_embeddings().weight
        self.dtypes_seen = frozenset((hidden.dtype, weight.dtype))
        if with_entropies:
            return linear_statistics(hidden, weight, targets, temperature=self.temperature)
        logprobs = linear_logprobs(
            hidden,
            weight,
            targets,
            temperature=self.temperature,
            kept_bytes=self.kept_logits_bytes,
        )
        return TokenStatistics(logprobs, logprobs.detach()[:0])

    def wrap_blocks(
        self,
        *,
        checkpointing: ActivationCheckpointing,
        compiled: bool,
        inputs: InputsOnHost | None = None,
    ) -> None:
        """Run every block as configured; see `wrap_block`, and `InputsOnHost` if it is given."""
        for block in self.blocks:
            wrapped = wrap_block(block.forward, checkpointing=checkpointing, compiled=compiled)
            block.forward = wrapped if inputs is None else inputs.wrap(wrapped)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """All that belongs into a Hugging Face checkpoint; a tied weight once, experts stacked."""
        yield from self.model.named_parameters()
        saved = self.model.state_dict().keys()
        yield from ((name, buffer) for name, buffer in self.model.named_buffers() if name in saved)

    def stored_weights(self) -> Iterator[NamedTensor]:
        """The same, each expert apart, under the names in the folder: views of whole weights."""
        for name, weight in self.named_weights():
            if name in self.stacks:
                yield from view_stack(name, weight.detach())
            else:
                yield NamedTensor(name, weight.detach())


def load_model(folder: Path, *, temperature: float) -> PackedCausalLM:
    """Load a Hugging Face folder in float32 on the CPU, and see that it computes what it should.

    Packed log-probabilities are compared with the model's own eager forward pass, one sequence at a
    time: a model whose head or attention does more than this package does is found here.

    Raises:
        FileNotFoundError: if the folder holds no config.json or no safetensors weights.
        ValueError: if weights are missing, left over or of another shape, if transformers converts
            them in a way that cannot be undone here, if config.json ties the head to an embedding
            that differs from it, or if the model is of a kind that packed training would compute
            wrongly.
    """
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        message = (
            f"{folder}: expected a Hugging Face folder with config.json and *.safetensors; "
            "download or convert the model first"
        )
        raise FileNotFoundError(message)
    stored = folder_shapes(folder)
    from transformers import AutoModelForCausalLM  # noqa: PLC0415  # heavy, and only for users

    register_attention()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are in the report, which is refused below
        )
    except RuntimeError as error:  # experts that do not stack, with a table in the log
        message = f"{folder}: transformers cannot load the weights: {error}"
        raise ValueError(message) from error
    model, report = loaded
    wrong = {kind: sorted(map(str, names)) for kind, names in report.items() if names}
    if wrong:
        message = (
            f"{folder}: the weights do not fit {type(model).__name__}, which would leave some of "
            f"it random: {wrong}"
        )
        raise ValueError(message)
    model.eval()  # dropout off, for good: logprobs must depend on weights and tokens alone
    names = (name for name, _ in model.named_parameters())
    stacks = frozenset(name for name in names if is_stack(name) and name not in stored)
    packed_model = PackedCausalLM(model, temperature=temperature, stacks=stacks)
    _check_kind(packed_model, folder)
    _check_stored(packed_model, folder, stored)
    _compare_with_eager(packed_model, folder)
    return packed_model


def _check_kind(packed_model: PackedCausalLM, folder: Path) -> None:
    model = packed_model.model
    kind = type(model).__name__
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.bias is not None:
        message = f"{folder}: expected an output projection without bias in {kind}, got {head}"
        raise ValueError(message)
    embedding = model.get_input_embeddings()
    if model.config.tie_word_embeddings and head.weight is not embedding.weight:
        # transformers ties them only if they are equal, and warns (5.19, `tie_weights`).
        message = (
            f"{folder}: config.json says tie_word_embeddings true, but the head and the embedding "
            f"of {kind} differ in the weights, so that what is trained would not be what is saved; "
            "set tie_word_embeddings to false in config.json to train the head by itself, or take "
            "its weight (lm_head.weight) out of the folder to train it as the embedding"
        )
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
    if getattr(model.config, "output_router_logits", False):
        message = (
            f"{folder}: expected output_router_logits false in config.json, got true: the loss is "
            "the one that the engine is handed, without the load-balancing loss that it asks for"
        )
        raise ValueError(message)
    for name, weight in packed_model.named_weights():
        if is_stack(name) and any(size % _SIZE_STEP for size in weight.shape[1:]):
            message = (
                f"{folder}: expected rows and columns of {name} in multiples of {_SIZE_STEP}, as "
                f"torch's grouped product needs them, got shape {tuple(weight.shape)}"
            )
            raise ValueError(message)
    other_dtypes = {
        name for name, value in packed_model.named_weights() if not value.is_floating_point()
    }
    if other_dtypes:
        message = f"{folder}: {kind} has weights that are no floating-point numbers: {other_dtypes}"
        raise ValueError(message)


def _check_stored(
    packed_model: PackedCausalLM, folder: Path, stored: Mapping[str, tuple[int, ...]]
) -> None:
    """What is exported is what is stored: the same names, shapes and rows.

    transformers converts some models while loading: it renames, stacks and transposes weights.
    The first row of each tells one layout from another, also where all sides are equally long.
    """
    weights = dict(packed_model.stored_weights())
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    wrong = [name for name, shape in shapes.items() if stored.get(name) != shape]
    if not wrong:
        wrong = _differing_rows(folder, weights)
    if wrong:
        name = wrong[0]
        message = (
            f"{folder}: transformers renames or converts weights of "
            f"{type(packed_model.model).__name__} while loading in a way that engine-fsdp does not "
            f"know, so that they cannot be exported as they are stored: {len(wrong)} differ, the "
            f"first is {name} of shape {shapes[name]}, which is stored "
            f"{f'with shape {stored[name]}' if name in stored else 'under no such name'}"
        )
        raise ValueError(message)


def _differing_rows(folder: Path, weights: Mapping[str, Tensor]) -> list[str]:
    """Names of the weights whose first row is another one in the folder."""
    from safetensors import safe_open  # noqa: PLC0415

    differing: list[str] = []
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys() & weights.keys():
                if weights[name].ndim == 0:
                    continue
                row = stored.get_slice(name)[:1].to(torch.float32)
                if not torch.equal(row, weights[name][:1]):
                    differing.append(name)
    return sorted(differing)


@torch.no_grad()
def _compare_with_eager(packed_model: PackedCausalLM, folder: Path) -> None:
    model = packed_model.model
    vocab_size = model.get_input_embeddings().num_embeddings
    num_probes = _NUM_PROBES if packed_model.has_experts else 1
    probes = [_probe_rows(_PROBE_LENGTHS, vocab_size, seed) for seed in range(num_probes)]
    expected = [_eager_logprobs(packed_model, rows) for rows in probes]
    model.set_attn_implementation(ATTENTION_NAME)
    if packed_model.has_experts:
        model.set_experts_implementation(EXPERTS_NAME)
    differences = []
    for rows, logprobs in zip(probes, expected, strict=True):
        got = packed_model(*pack_rows(rows)).logprobs
        differences.append((got - logprobs).abs().max().item())
    if not any(difference <= _PROBE_TOLERANCE for difference in differences):
        message = (
            f"{folder}: packed log-probabilities of {type(model).__name__} differ by up to "
            f"{min(differences):.3g} nats from its own eager forward pass (allowed "
            f"{_PROBE_TOLERANCE}); its attention, experts or head do something that engine-fsdp "
            "does not know"
        )
        raise ValueError(message)


def _eager_logprobs(
    packed_model: PackedCausalLM, rows: Sequence[Tensor]
) -> Float[Tensor, " scored"]:
    """Log-probability of each token but the first of its row, by the model's own forward pass."""
    logprobs = []
    for row in rows:
        logits = packed_model.model(input_ids=row[None], use_cache=False).logits[0, :-1]
        log_p = (logits.float() / packed_model.temperature).log_softmax(-1)
        logprobs.append(log_p.gather(1, row[1:, None])[:, 0])
    return torch.cat(logprobs)


def _probe_rows(lengths: Sequence[int], vocab_size: int, seed: int) -> list[Tensor]:
    """Fixed token ids spread over the vocabulary, others for each seed."""
    return [
        (torch.arange(1, length + 1) * (7919 + index) + 104729 * seed) % vocab_size
        for index, length in enumerate(lengths)
    ]


def pack_rows(
    rows: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor, PackedSequences]:
    """Arguments of `PackedCausalLM.forward` that score every token but the first of each row."""
    lengths = torch.tensor([0, *(len(row) for row in rows)])
    token_ids = torch.cat(list(rows))
    positions = torch.cat([torch.arange(len(row)) for row in rows])
    scored = positions.nonzero()[:, 0]
    layout = lay_out(lengths.cumsum(0), device=torch.device("cpu"), dtype=torch.float32)
    return token_ids, positions, scored - 1, token_ids[scored], layout
