"""The public surface, and that shapes are really checked in these tests."""

import subprocess
import sys

import pytest
import torch

import algos_gspo_dapo_grpo
from algos_gspo_dapo_grpo import GrpoAdvantages, Sequences, grpo_advantages, kl_k1


def test_every_public_name_exists_and_the_list_is_sorted() -> None:
    """``__all__`` is sorted, has no duplicates and names what is there."""
    names = algos_gspo_dapo_grpo.__all__
    assert len(set(names)) == len(names)
    assert all(hasattr(algos_gspo_dapo_grpo, name) for name in names)
    classes = [name for name in names if name[0].isupper()]
    functions = [name for name in names if not name[0].isupper()]
    assert names == sorted(classes) + sorted(functions)


def test_a_wrong_shape_is_refused() -> None:
    """The shapes in the signatures are checked: two names of one axis must agree."""
    with pytest.raises(Exception, match=r"group_ids"):
        grpo_advantages(torch.zeros(4), torch.zeros(3, dtype=torch.int64), config=GrpoAdvantages())
    with pytest.raises(Exception, match=r"ref_logprobs"):
        kl_k1(torch.zeros(2, 3), torch.zeros(3, 2))
    with pytest.raises(Exception, match=r"cu_seqlens"):
        Sequences.packed(torch.zeros(3), num_tokens=4)


def test_importing_the_package_loads_no_other_package_of_ours() -> None:
    """The package is usable alone: torch and attrs are all it needs."""
    script = (
        "import sys, algos_gspo_dapo_grpo\n"
        "names = {name.partition('.')[0] for name in sys.modules}\n"
        "assert 'torch' in names\n"
        "print(sorted(names & {'rl_contracts', 'rl_metrics', 'parallel_state', 'vllm', 'ray',\n"
        "                      'transformers', 'beartype'}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "[]"
