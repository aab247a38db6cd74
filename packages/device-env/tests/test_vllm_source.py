"""Names read by vLLM, from its source text."""

import pytest

from device_env import names_read_by_vllm


def test_keys_of_the_table_are_found_annotated_or_not() -> None:
    """Both spellings of the assignment are understood, and nothing is executed."""
    annotated = "raise SystemExit\nenvironment_variables: dict = {'VLLM_A': lambda: 1}\n"
    plain = "environment_variables = {'VLLM_A': 1, **more}\n"
    assert names_read_by_vllm(annotated) == names_read_by_vllm(plain) == {"VLLM_A"}


def test_a_source_without_the_table_is_refused() -> None:
    """A vLLM that keeps its names elsewhere is not taken for one that reads none."""
    with pytest.raises(ValueError, match=r"expected a dictionary environment_variables"):
        names_read_by_vllm("x = 1")
