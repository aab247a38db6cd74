"""Made-up problems that show images, for a tiny model that half knows its colours."""

from typing import ClassVar

import attrs
from conduct import Problems
from tiny_vision import square_problems

from rl_tasks import ExactMatch

SQUARE_PROMPT, SQUARE_COMPLETION = 14, 8
"""Longest prompt and completion of `ColouredSquares`, in tokens: a picture has 4 placeholders."""


@attrs.frozen(kw_only=True)
class ColouredSquares:
    """A picture of a coloured square, and the question for its colour."""

    kind: ClassVar[str] = "squares"

    num_train: int = attrs.field(default=400, validator=attrs.validators.ge(1))
    """Problems to train on."""

    num_heldout: int = attrs.field(default=40, validator=attrs.validators.ge(1))
    """Problems that are never trained on."""

    seed: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    """Of the problems."""

    max_prompt_tokens: int = attrs.field(default=SQUARE_PROMPT, validator=attrs.validators.ge(13))
    """Room for the prompt, in tokens; each here has 13."""

    def problems(self) -> Problems:
        """Make them up."""
        made = square_problems(self.num_heldout + self.num_train, seed=self.seed)
        return Problems(
            train=made[self.num_heldout :],
            heldout=made[: self.num_heldout],
            rewards={"squares": ExactMatch()},
        )
