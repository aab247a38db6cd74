"""What vLLM's CPU build leaves undone when it starts; lives in the engine's process.

*Speculative decoding.* Before guesses are checked, each request's temperature, top_k and top_p are
repeated for all of its guesses. The CPU's own kernel for that converts its output to whole numbers
first and so writes into a copy: guesses are checked with whatever stood in that memory, and no
error says so (`_expand_kernel_impl` in vllm/utils/cpu_triton_utils.py, vLLM 0.25.1 to 0.32). And
a step in which nothing was guessed ends the engine if one of its requests has a top_k
(`apply_top_k_only` takes the maximum of nothing, 0.32). The functions that call them are replaced
here, and the first is checked.

*Pipelines.* A stage keeps tensors for what comes from the stage before, and makes them in a first
run of the model. Without compiled graphs the CPU build leaves that run out, and the second stage
fails at the first request (`_should_warm_up_model` in vllm/v1/worker/cpu_worker.py, vLLM 0.30 and
0.32). It is done here.
"""

from typing import Protocol

import torch
from torch import Tensor
from vllm.config import VllmConfig as EngineConfig
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.metadata import SamplingMetadata


class ModelRunner(Protocol):
    """What a worker of vLLM runs its model with."""

    intermediate_tensors: object
    """What comes from the stage before; None until the first run."""

    def profile_run(self) -> None:
        """Run the model once, on nothing."""


def prepare_cpu(config: EngineConfig, model_runner: ModelRunner) -> None:
    """Do what this config needs beyond what vLLM has done.

    Raises:
        RuntimeError: if guesses would be checked with wrong parameters all the same.
    """
    stages = config.parallel_config.pipeline_parallel_size
    if stages > 1 and model_runner.intermediate_tensors is None:
        model_runner.profile_run()
    if config.speculative_config is not None:
        mend_guesses()
        check_repeats()


def mend_guesses() -> None:
    """Let guesses be checked with the parameters of their requests; may be called twice."""
    constrained = rejection_sampler.apply_sampling_constraints

    def constrained_if_any(
        logits: Tensor, cu_num_draft_tokens: Tensor, sampling_metadata: SamplingMetadata
    ) -> Tensor:
        if logits.shape[0] == 0:
            return logits
        return constrained(logits, cu_num_draft_tokens, sampling_metadata)

    rejection_sampler.apply_sampling_constraints = constrained_if_any
    rejection_sampler.expand_batch_to_tokens = repeated


def repeated(
    x: Tensor,
    cu_num_tokens: Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> Tensor:
    """Each request's value once for each of its guesses; the names are vLLM's.

    Args:
        x: [requests].
        cu_num_tokens: [requests]; guesses of this request and those before.
        num_tokens: guesses of all requests.
        replace_from: a value that stands for another.
        replace_to: that other.

    Returns:
        [num_tokens], of the type of `x`.
    """
    counts = torch.diff(cu_num_tokens.long(), prepend=cu_num_tokens.new_zeros(1).long())
    replaced = torch.where(x == replace_from, replace_to, x).to(x.dtype)
    return replaced.repeat_interleave(counts, output_size=num_tokens)


def check_repeats() -> None:
    """Refuse a vLLM that checks guesses with other parameters than the requests have.

    Raises:
        RuntimeError: names what it makes of them.
    """
    counts = torch.tensor([2, 2, 5], dtype=torch.int32)
    for values in (torch.tensor([0.5, 0.0, 2.5]), torch.tensor([7, 0, 9], dtype=torch.int32)):
        found = rejection_sampler.expand_batch_to_tokens(
            values, counts, 5, replace_from=0, replace_to=1
        )
        expected = values[[0, 0, 2, 2, 2]]
        if not torch.equal(found, expected):
            raise RuntimeError(
                "speculative decoding: vLLM's CPU build repeats the requests' parameters "
                f"{values.tolist()} for their guesses as {found.tolist()}, expected "
                f"{expected.tolist()}"
            )
