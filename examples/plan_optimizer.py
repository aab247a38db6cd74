"""What is trained, and what the optimizer keeps of it, over all shards."""

import functools
import json

import torch
from plan_model import ModelFacts

from engine_fsdp import FsdpConfig
from engine_fsdp.eight_bit import BYTES_PER_WEIGHT
from engine_fsdp.model import PackedCausalLM
from engine_fsdp.training_set import eight_bit_weights, trained_parameters
from engine_veomni import VeomniConfig


def trained_weights(engine: FsdpConfig | VeomniConfig, model: ModelFacts) -> int:
    """How many there are."""
    if isinstance(engine, FsdpConfig) and engine.lora is not None:
        return _adapters(engine, model)
    return model.counts.total


def moment_bytes(engine: FsdpConfig | VeomniConfig, model: ModelFacts) -> int:
    """Bytes of the moments: two in float32 of AdamW, fewer where the engine is asked to."""
    both = 8 * trained_weights(engine, model)
    if isinstance(engine, VeomniConfig):
        return both
    if engine.muon is not None:
        counts = model.counts
        return both - 4 * (counts.attention + counts.dense_mlp + counts.router)
    if engine.eight_bit_moments:
        try:
            in_eight_bits = num_in_eight_bits(model)
        except ValueError:  # which is why the run is refused; see run_plan
            in_eight_bits = 0
        return both - int((8 - BYTES_PER_WEIGHT) * in_eight_bits)
    return both


def num_in_eight_bits(model: ModelFacts) -> int:
    """Weights whose moments have 8 bits with `eight_bit_moments`: engine-fsdp's own choice.

    Raises:
        ValueError: if there are none.
    """
    return _num_in_eight_bits(json.dumps(dict(model.config), sort_keys=True))


@functools.cache
def _num_in_eight_bits(config: str) -> int:
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415  # heavy

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**json.loads(config)))
    packed = PackedCausalLM(model, temperature=1.0)
    trained = trained_parameters(packed)
    found: int = sum(trained[name].numel() for name in eight_bit_weights(packed))
    return found


def _adapters(engine: FsdpConfig, model: ModelFacts) -> int:
    hidden, inner = model.hidden_size, model.intermediate_size
    sides = {
        "q_proj": hidden + model.query_size,
        "k_proj": hidden + model.key_value_size,
        "v_proj": hidden + model.key_value_size,
        "o_proj": hidden + model.query_size,
        "gate_proj": hidden + inner,
        "up_proj": hidden + inner,
        "down_proj": hidden + inner,
    }
    assert engine.lora is not None  # noqa: S101  # asked by the caller
    width = sum(sides.get(name, 0) for name in engine.lora.target_modules)
    return engine.lora.rank * width * model.num_hidden_layers
