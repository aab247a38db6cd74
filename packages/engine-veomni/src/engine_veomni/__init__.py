"""Mixture-of-experts training through the real VeOmni, with expert parallelism that is on."""

from engine_veomni.build import ExpertSharding, read_model_config
from engine_veomni.config import VeomniConfig
from engine_veomni.engine import VeomniEngine
from engine_veomni.scorer import VeomniScorer
from engine_veomni.versions import TESTED_VEOMNI, check_veomni_version
from rl_contracts import DType, OptimConfig

__all__ = [
    "TESTED_VEOMNI",
    "DType",
    "ExpertSharding",
    "OptimConfig",
    "VeomniConfig",
    "VeomniEngine",
    "VeomniScorer",
    "check_veomni_version",
    "read_model_config",
]
