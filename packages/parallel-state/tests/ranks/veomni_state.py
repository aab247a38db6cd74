"""What each gloo rank reads back from the installed VeOmni."""

import inspect
import warnings
from typing import Any

# Imported here, once for all ranks, before warnings are errors.
from veomni.distributed.parallel_state import clear_parallel_state, init_parallel_state

from parallel_state import ExtraParallelSizes, ParallelState
from parallel_state.veomni import from_veomni, to_veomni_kwargs

STATES: dict[str, ParallelState[Any]] = {
    "shards": ParallelState(dp_size=4, extra_parallel_sizes=ExtraParallelSizes.of(ep=4)),
    "replicas": ParallelState(
        dp_size=4, dp_replicate_size=2, extra_parallel_sizes=ExtraParallelSizes.of(ep=2)
    ),
    "ulysses": ParallelState(
        dp_size=2, ulysses_size=2, extra_parallel_sizes=ExtraParallelSizes.of(ep=2)
    ),
    "two axes": ParallelState(
        dp_size=4, extra_parallel_sizes=ExtraParallelSizes({"ep": 2, "emb": 4})
    ),
    "tensor": ParallelState(dp_size=2, tensor_size=2),
}


def round_trips() -> object:
    """Ours, written, initialised by VeOmni, and read again."""
    signature = inspect.signature(init_parallel_state)
    seen = {}
    for name, state in STATES.items():
        kwargs = to_veomni_kwargs(state, device_type="cpu", signature=signature)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of VeOmni's own calls
            raw = init_parallel_state(**kwargs)
        reading = from_veomni(raw, axes=tuple(state.extra_parallel_sizes))
        clear_parallel_state()
        seen[name] = [reading.state == state, reading.shape.name, sorted(reading.compared_axes)]
    return seen
