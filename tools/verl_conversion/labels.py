"""What can be said of an override; docs/from_verl.md explains each."""

from typing import Literal, get_args

Label = Literal[
    "carried",
    "default",
    "renamed",
    "inert",
    "overwritten",
    "duplicate",
    "stale",
    "trap",
    "no counterpart",
    "broken",
    "unresolved",
    "unknown",
]
"""What can be said of an override; one may have several."""

LABELS: tuple[Label, ...] = get_args(Label)
