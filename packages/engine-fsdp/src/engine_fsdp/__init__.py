"""FSDP2 training of any Hugging Face causal language model, on packed sequences."""

from engine_fsdp.config import FsdpConfig, LoraConfig, MuonConfig
from engine_fsdp.engine import FsdpEngine
from engine_fsdp.planning import MemoryPlan, plan
from engine_fsdp.saving import PendingCheckpoint
from engine_fsdp.scorer import FsdpScorer
from rl_contracts import DType, OptimConfig

__all__ = [
    "DType",
    "FsdpConfig",
    "FsdpEngine",
    "FsdpScorer",
    "LoraConfig",
    "MemoryPlan",
    "MuonConfig",
    "OptimConfig",
    "PendingCheckpoint",
    "plan",
]
