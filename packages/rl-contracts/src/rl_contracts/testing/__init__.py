"""Fakes that ship, and the behaviour that every engine and sampler must show.

`ToyEngine` and `ToySampler` share a table of next-token logits: small enough to follow by hand,
real enough to learn. The checks in `rl_contracts.testing.engine_contract` and
`rl_contracts.testing.sampler_contract` are plain functions, for any test runner.
"""

from rl_contracts.testing.engine_contract import ENGINE_CHECKS, EngineUnderTest
from rl_contracts.testing.sampler_contract import SAMPLER_CHECKS, SamplerUnderTest
from rl_contracts.testing.toy_engine import ToyEngine
from rl_contracts.testing.toy_sampler import ToySampler

__all__ = [
    "ENGINE_CHECKS",
    "SAMPLER_CHECKS",
    "EngineUnderTest",
    "SamplerUnderTest",
    "ToyEngine",
    "ToySampler",
]
