"""Shapes and types of every function of the package are checked while its tests run."""

import pytest
import torch
from jaxtyping import install_import_hook

# In force for the first import of the package, whichever test makes it.
with install_import_hook("algos_gspo_dapo_grpo", "beartype.beartype"):
    import algos_gspo_dapo_grpo  # noqa: F401


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
