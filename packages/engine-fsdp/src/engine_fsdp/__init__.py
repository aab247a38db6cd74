"""FSDP2 training of any Hugging Face causal language model, on packed sequences."""

from engine_fsdp.config import DType, FsdpConfig, OptimConfig
from engine_fsdp.engine import FsdpEngine
from engine_fsdp.process_group import init_process_group

__all__ = ["DType", "FsdpConfig", "FsdpEngine", "OptimConfig", "init_process_group"]
