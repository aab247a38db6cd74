"""FSDP2 training of any Hugging Face causal language model, on packed sequences."""

from engine_fsdp.config import FsdpConfig
from engine_fsdp.engine import FsdpEngine
from rl_contracts import DType, OptimConfig

__all__ = ["DType", "FsdpConfig", "FsdpEngine", "OptimConfig"]
