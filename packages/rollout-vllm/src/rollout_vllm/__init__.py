"""A typed, versioned sampler on vLLM: what is configured is what the engine runs."""

from rollout_vllm.arguments import EffectiveArgument
from rollout_vllm.config import AttentionBackend, Dtype, LoadFormat, Quantization, VllmConfig
from rollout_vllm.device_rules import Device
from rollout_vllm.engine import InFlight
from rollout_vllm.environment import EnvironmentSetting, engine_environment
from rollout_vllm.errors import (
    GenerationError,
    RolloutError,
    SamplerClosedError,
    SamplerDiedError,
    StartError,
    WeightUpdateError,
)
from rollout_vllm.lora import Lora, adapter_weights
from rollout_vllm.offered import OfferedWeights
from rollout_vllm.options import RequestOptions, TokenDelta
from rollout_vllm.publication import Publication
from rollout_vllm.routing import RoutedCompletion
from rollout_vllm.sampler import VllmSampler
from rollout_vllm.server_config import ServerConfig
from rollout_vllm.sleep import MemoryChange, SamplerAsleepError
from rollout_vllm.speculation import Speculation, SpeculationMethod
from rollout_vllm.weights_sender import PublishedFile, PublishedWeights, publish_weights

__all__ = [
    "AttentionBackend",
    "Device",
    "Dtype",
    "EffectiveArgument",
    "EnvironmentSetting",
    "GenerationError",
    "InFlight",
    "LoadFormat",
    "Lora",
    "MemoryChange",
    "OfferedWeights",
    "Publication",
    "PublishedFile",
    "PublishedWeights",
    "Quantization",
    "RequestOptions",
    "RolloutError",
    "RoutedCompletion",
    "SamplerAsleepError",
    "SamplerClosedError",
    "SamplerDiedError",
    "ServerConfig",
    "Speculation",
    "SpeculationMethod",
    "StartError",
    "TokenDelta",
    "VllmConfig",
    "VllmSampler",
    "WeightUpdateError",
    "adapter_weights",
    "engine_environment",
    "publish_weights",
]
