"""What a transport of weights is, in two halves.

::

    trainer's process                 sampler's process              engine's process
    sending half ── a Publication ──▶ check it against the model ──▶ receiving half
    (no vLLM)      (small, picklable)  before the first byte          (by `transport`)

=============  =======================  =============================  ==========================
transport      sending half             publication                    receiving half
=============  =======================  =============================  ==========================
``files``      `publish_weights`        `PublishedWeights`: files in   `file_receiver`
                                        shared memory or on a disk
``stream``     `WeightStream`           `OfferedWeights`: a socket,    `stream_receiver`
                                        then memory that is shared
                                        (CUDA IPC, host) or filled by
                                        a broadcast (NCCL, gloo)
=============  =======================  =============================  ==========================
"""

from collections.abc import Mapping
from typing import Protocol

from rl_contracts.rollout import PolicyVersion
from rollout_vllm.config import Dtype
from rollout_vllm.headers import TensorHeader


class Publication(Protocol):
    """One version of the weights, ready to be taken; small and picklable."""

    @property
    def version(self) -> PolicyVersion:
        """Optimizer steps behind these weights."""

    @property
    def dtype(self) -> Dtype:
        """Type that floating-point weights were cast to."""

    def tensors(self) -> Mapping[str, TensorHeader]:
        """Names and shapes of all weights, known before the first byte of them moves.

        Raises:
            ValueError: if what was published is not there any more, or is not what was written.
        """

    def different_heads(self, tied_head: str) -> list[str]:
        """Names of the embeddings to which a tied head that was sent too is not equal."""

    def instructions(self) -> Mapping[str, object]:
        """What the receiving half needs to know, as plain values; `transport` names that half."""

    def refuse(self, reason: str) -> None:
        """Tell the sending half, if it waits, that these weights are not taken."""

    def remove(self) -> None:
        """Free what holds them, once they were taken. Removing twice is allowed."""
