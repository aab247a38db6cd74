"""How long the workers of a pool may take, and what is told about them."""

from dataclasses import dataclass
from typing import Literal

import attrs

from rl_contracts.rollout import PolicyVersion

WorkerState = Literal["starting", "serving", "leaving", "gone"]


@attrs.frozen(kw_only=True)
class PoolLimits:
    """How long a worker may take, and how often it is replaced."""

    call_s: float = attrs.field(default=600.0, validator=attrs.validators.gt(0.0))
    """Seconds that one piece of work may take before it is given to another worker, and this one is
    replaced. Default: ten minutes, as the longest completions take a few."""

    start_s: float = attrs.field(default=600.0, validator=attrs.validators.gt(0.0))
    """Seconds until a worker is ready. Default: ten minutes, enough to load and compile a model."""

    load_s: float = attrs.field(default=300.0, validator=attrs.validators.gt(0.0))
    """Seconds in which a worker takes new weights. Default: five minutes."""

    leave_s: float = attrs.field(default=600.0, validator=attrs.validators.gt(0.0))
    """Seconds that a worker that leaves has for the work that it began. Default: as `call_s`."""

    max_restarts: int = attrs.field(default=3, validator=attrs.validators.ge(0))
    """How often one worker is replaced, at most. Default: three; a fault that comes back each time
    is not one of the machine."""

    restart_s: float = attrs.field(default=1.0, validator=attrs.validators.ge(0.0))
    """Seconds before a worker is replaced, in which what it held becomes free. Default: one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerStatus:
    """One worker, as it is now."""

    name: str
    state: WorkerState
    version: PolicyVersion | None
    """Of the weights that it was given; None for those that it was built with."""
    num_running: int
    """Pieces of work that it has in hand."""
    num_restarts: int
