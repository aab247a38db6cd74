"""Mixture-of-experts training through the real VeOmni, with expert parallelism that is on."""

from engine_veomni.build import ExpertSharding, read_model_config
from engine_veomni.config import DType, OptimConfig, VeomniConfig
from engine_veomni.engine import VeomniEngine
from engine_veomni.process_group import init_process_group
from engine_veomni.versions import TESTED_VEOMNI, check_veomni_version

__all__ = [
    "TESTED_VEOMNI",
    "DType",
    "ExpertSharding",
    "OptimConfig",
    "VeomniConfig",
    "VeomniEngine",
    "check_veomni_version",
    "init_process_group",
    "read_model_config",
]
