"""Which weights drew which token, kept in the caller's process.

vLLM says it itself from 0.32 on (`CompletionOutput.weight_versions`). For earlier versions the
sampler counts: an update holds all requests, and what a request has drawn until then belongs to
the weights before. Knows nothing of vLLM.
"""

from collections.abc import Mapping
from typing import final

from rl_contracts.rollout import PolicyVersion


@final
class TokenVersions:
    """Versions of the tokens of running requests. One sample is one request here.

    ::

        begin("7-0") ── 3 tokens ── mark({"7-0": 3}, 1) ── 2 tokens ── take("7-0", 5)
                        version 0                          version 1   = (0, 0, 0, 1, 1)
    """

    def __init__(self) -> None:
        self._present = PolicyVersion(0)
        # of each running request, the weights replaced while it ran: how many tokens it had then,
        # or None if it had ended, and which version they were
        self._replaced: dict[str, list[tuple[int | None, PolicyVersion]]] = {}

    def begin(self, request_id: str) -> None:
        """A request starts; call it before vLLM hears of the request."""
        self._replaced[request_id] = []

    def mark(self, num_tokens: Mapping[str, int], version: PolicyVersion) -> None:
        """New weights take over while no request moves.

        Args:
            num_tokens: tokens that each running request has; one that is not there has ended,
                with its outcome not taken yet.
            version: what the next token is drawn from.
        """
        for request_id, replaced in self._replaced.items():
            replaced.append((num_tokens.get(request_id), self._present))
        self._present = version

    def take(self, request_id: str, num_tokens: int) -> tuple[PolicyVersion, ...]:
        """Versions of all tokens of a request that ended."""
        versions: list[PolicyVersion] = []
        for end, version in self._replaced[request_id]:
            until = num_tokens if end is None else min(end, num_tokens)
            versions += [version] * (until - len(versions))
        versions += [self._present] * (num_tokens - len(versions))
        return tuple(versions)

    def forget(self, request_id: str) -> None:
        """A request is over; nothing happens if it is not known."""
        self._replaced.pop(request_id, None)
