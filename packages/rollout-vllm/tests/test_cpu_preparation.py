"""What is mended of vLLM's CPU build before it checks guesses; imports vLLM, runs no engine."""

from typing import NamedTuple

import pytest
import torch
from vllm.v1.sample import rejection_sampler

from rollout_vllm.cpu_preparation import check_repeats, mend_guesses, prepare_cpu, repeated

pytestmark = pytest.mark.slow


class _Parallel(NamedTuple):
    pipeline_parallel_size: int


class _Config(NamedTuple):
    """What is read of vLLM's config."""

    parallel_config: _Parallel
    speculative_config: object = None


class _Runner:
    """A model runner that has not run yet."""

    def __init__(self) -> None:
        self.intermediate_tensors: object = None
        self.runs = 0

    def profile_run(self) -> None:
        self.runs += 1
        self.intermediate_tensors = {}


def test_each_value_is_repeated_for_its_guesses() -> None:
    """Two guesses, none, three; 0 stands for 1."""
    counts = torch.tensor([2, 2, 5], dtype=torch.int32)
    values = repeated(torch.tensor([0.5, 7.0, 0.0]), counts, 5, replace_from=0, replace_to=1)
    assert values.tolist() == [0.5, 0.5, 1.0, 1.0, 1.0]
    whole = repeated(torch.tensor([4, 0, 9], dtype=torch.int32), counts, 5)
    assert whole.tolist() == [4, 4, 9, 9, 9]
    assert whole.dtype == torch.int32
    none = repeated(torch.tensor([0.5]), torch.tensor([0], dtype=torch.int32), 0)
    assert none.tolist() == []


def test_guesses_checked_with_other_parameters_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What vLLM then calls is tried before a token is drawn."""
    for name in ("expand_batch_to_tokens", "apply_sampling_constraints"):
        monkeypatch.setattr(rejection_sampler, name, getattr(rejection_sampler, name))
    mend_guesses()
    check_repeats()
    empty = torch.empty(0, 8)
    nothing = torch.zeros(0, dtype=torch.int32)
    assert rejection_sampler.apply_sampling_constraints(empty, nothing, None) is empty  # type: ignore[arg-type]
    monkeypatch.setattr(
        rejection_sampler,
        "expand_batch_to_tokens",
        lambda values, *_, **__: torch.full((5,), 3, dtype=values.dtype),
    )
    with pytest.raises(
        RuntimeError, match=r"\[0.5, 0.0, 2.5\] for their guesses as \[3.0, .*expected \[0.5, 0.5"
    ):
        check_repeats()


def test_stages_run_once_before_the_first_request() -> None:
    """A stage that has run, and a model of one stage, are left alone."""
    runner = _Runner()
    prepare_cpu(_Config(_Parallel(1)), runner)  # type: ignore[arg-type]
    assert runner.runs == 0
    for _ in range(2):
        prepare_cpu(_Config(_Parallel(2)), runner)  # type: ignore[arg-type]
    assert runner.runs == 1
