"""The first of several errors ends the others, and is raised as it is."""

import asyncio

import pytest

from rollout_vllm.gathered import gathered


def test_results_come_in_order() -> None:
    async def late(value: int) -> int:
        await asyncio.sleep(0.01 * (3 - value))
        return value

    assert asyncio.run(gathered(late(value) for value in range(3))) == [0, 1, 2]


def test_one_error_ends_the_others_and_keeps_its_cause() -> None:
    ended: list[str] = []

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("waits")

    async def fails() -> None:
        await asyncio.sleep(0)
        raise ValueError("first") from KeyError("cause")

    with pytest.raises(ValueError, match="first") as error:
        asyncio.run(gathered([waits(), fails()]))
    assert isinstance(error.value.__cause__, KeyError)
    assert ended == ["waits"]
