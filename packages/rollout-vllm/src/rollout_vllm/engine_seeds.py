"""Random streams of data-parallel engines; runs in vLLM's process.

Before 0.32 every engine starts with the same seed (`set_random_seed(model_config.seed)` in
vllm/v1/worker/gpu_worker.py, 0.25.1), and draws a seed for each request from it: the first requests
of two engines, often two samples of one prompt, then get the same noise and the same tokens.
"""

import random

import numpy as np
import torch

# numpy takes 32 bits; a prime step keeps replicas of neighbouring seeds apart
_SEEDS, _STEP = 2**32, 1_000_003


def seed_engine(seed: int, *, index: int) -> int:
    """Give an engine a stream of its own; all its workers get the same one.

    Args:
        seed: that of the config, which all engines share.
        index: which of the data-parallel engines this is.

    Returns:
        The engine's own seed; that of the first is the config's.
    """
    own = (seed + _STEP * index) % _SEEDS
    random.seed(own)
    np.random.seed(own)  # noqa: NPY002  (vLLM draws from the legacy stream)
    torch.manual_seed(own)
    return own
