"""What became of an engine that failed at something; a fake of vLLM's client, no engine."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rl_contracts.rollout import PolicyVersion
from rollout_vllm import SamplerDiedError, WeightUpdateError
from rollout_vllm.vllm_engine import VllmEngine


class FakeClient:
    """Fails as vLLM's client does with two workers: with a bare `Exception`, in any case.

    Args:
        fails: methods that fail.
        answers: what comes of questions after that; a text: such a failure, None: never an answer.
    """

    def __init__(self, fails: str, answers: list[object]) -> None:
        self.fails = fails
        self.answers = answers
        self.asked: list[str] = []
        self.model_config = SimpleNamespace(hf_text_config=SimpleNamespace())
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=2))

    def _fail(self, method: str) -> None:
        if method == self.fails:
            raise Exception(f"Call to {method} method failed")  # noqa: TRY002  (as vLLM does)

    async def start_weight_update(self) -> None:
        self._fail("start_weight_update")

    async def update_weights(self, request: object) -> None:
        del request
        self._fail("update_weights")

    async def sleep(self, *, level: int, mode: str) -> None:
        assert (level, mode) == (1, "keep")
        self._fail("sleep")

    async def wake_up(self, tags: list[str]) -> None:
        assert tags == ["weights"]
        self._fail("wake_up")

    async def collective_rpc(self, method: str, args: tuple[object, ...] = ()) -> object:
        del args
        if method == "rollout_meet":
            self._fail(method)
            return [None, None]
        self.asked.append(method)
        answer = self.answers.pop(0)
        if answer is None:
            await asyncio.Event().wait()
        if isinstance(answer, str):
            raise Exception(answer)  # noqa: TRY002, TRY004
        return answer


def fail(method: str, answers: list[object]) -> FakeClient:
    """Ask the engine for what fails there."""
    client: Any = FakeClient(method, answers)
    engine = VllmEngine(client, routed=False, adapted=False, serves=False)
    if method == "sleep":
        asyncio.run(engine.sleep(keep_weights=True))
    elif method == "wake_up":
        asyncio.run(engine.wake(("weights",)))
    else:
        asyncio.run(engine.update_weights({"transport": "stream"}, version=PolicyVersion(3)))
    raise AssertionError("it has not failed")


CHANGES = ["update_weights", "sleep", "wake_up"]


@pytest.mark.parametrize("method", CHANGES)
def test_an_engine_whose_worker_died_has_died(method: str) -> None:
    """A set replaces it and tries again, which it does not after weights that nobody can load."""
    with pytest.raises(SamplerDiedError, match=rf"{method} method failed; .*: Executor failed"):
        fail(method, ["Executor failed.", "Executor failed."])


@pytest.mark.parametrize("method", CHANGES)
def test_an_engine_that_answers_has_broken_off(method: str) -> None:
    """Even if the other worker's failure of before is what comes first."""
    with pytest.raises(WeightUpdateError, match=f"broke off in the engine: Call to {method}"):
        fail(method, [[{}, {}]])
    with pytest.raises(WeightUpdateError, match=f"broke off in the engine: Call to {method}"):
        fail(method, ["Worker failed", [{}, {}]])


@pytest.mark.parametrize("method", [*CHANGES, "rollout_meet"])
def test_an_engine_that_does_not_answer_has_died(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait is bounded: vLLM never answers what was asked of an engine that then ended."""
    monkeypatch.setattr("rollout_vllm.vllm_engine._ANSWER_TIMEOUT_S", 0.01)
    with pytest.raises(SamplerDiedError, match=r"vLLM's engine: nothing within 0\.01 s"):
        fail(method, [None])


def test_an_engine_that_did_not_reach_the_sender_is_asked_too() -> None:
    """It may be spared if it lives, and is replaced if it does not."""
    with pytest.raises(ConnectionError, match="did not reach the sender: Call to rollout_meet"):
        fail("rollout_meet", [[None, None]])
    with pytest.raises(SamplerDiedError, match=r"did not reach the sender.*: Executor failed"):
        fail("rollout_meet", ["Executor failed."])
