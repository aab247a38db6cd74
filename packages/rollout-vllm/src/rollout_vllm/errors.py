"""Errors of the sampler; vLLM's own exceptions stop here and stay visible as the cause.

::

    RolloutError
    ├── StartError          vLLM did not come up, or runs something else than was configured
    ├── GenerationError     a request failed; the sampler goes on
    └── SamplerClosedError  the sampler answers no more
        ├── SamplerDiedError    its engine process died, or a worker of it
        └── WeightUpdateError   a weight update broke off half-way

A caller's mistake (an empty prompt, a weight of the wrong shape) is a `ValueError` or `TypeError`.
"""


class RolloutError(RuntimeError):
    """Base of what can go wrong while sampling."""


class StartError(RolloutError):
    """The engine did not start, or reports other settings than were asked for."""


class GenerationError(RolloutError):
    """One request failed; others and later ones are not affected."""


class SamplerClosedError(RolloutError):
    """The sampler was closed, or closed itself; start another one."""


class SamplerDiedError(SamplerClosedError):
    """The engine process died, or one of its workers, or it does not answer after a failure."""


class WeightUpdateError(SamplerClosedError):
    """A weight update broke off after the first weight was touched.

    The sampler closes itself, so that no token is drawn from half of each.
    """
