"""Completions that say which experts their tokens went to."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from rl_contracts.rollout import Completion


# equal if the completions are: an array has no single truth value
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RoutedCompletion(Completion):
    """A completion of a mixture-of-experts model, with the router's decisions.

    What `VllmSampler.sample` returns with `VllmConfig.return_routed_experts`, so that a trainer can
    replay them.
    """

    routed_experts: Int[np.ndarray, "positions layers experts_per_token"]
    """Experts that each token of prompt and completion went to, the last token left out: it was
    never the input of a step. Which of the chosen experts comes first says nothing."""
