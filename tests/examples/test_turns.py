"""Trainer and samplers that take turns on the same devices."""

import asyncio
import sys
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from turns import Side, Turns


class Devices:
    """Checks that one side computes at a time, and only with devices of its own."""

    def __init__(self) -> None:
        self.owner: Side = "sampler"
        self.sampling = 0
        self.training = 0
        self.moves: list[Side] = []
        self.hold = asyncio.Event()
        self.hold.set()

    async def hand_over(self, side: Side) -> None:
        assert side != self.owner
        assert not self.sampling
        assert not self.training
        self.moves.append(side)
        await self.hold.wait()
        assert not self.sampling
        assert not self.training
        self.owner = side

    def turns(self) -> Turns:
        return Turns(hand_over=self.hand_over, owner="sampler")

    async def sample(self, turns: Turns, ticks: int) -> None:
        async with turns.sampling():
            self.sampling += 1
            for _ in range(ticks):
                assert self.owner == "sampler"
                assert not self.training
                await asyncio.sleep(0)
            self.sampling -= 1

    async def train(self, turns: Turns, ticks: int) -> None:
        async with turns.training():
            self.training += 1
            for _ in range(ticks):
                assert self.owner == "trainer"
                assert not self.sampling
                assert self.training == 1
                await asyncio.sleep(0)
            self.training -= 1


Work = st.tuples(st.sampled_from(["sample", "train"]), st.integers(0, 5), st.integers(0, 5))


@given(st.lists(Work, max_size=20))
def test_one_side_at_a_time_and_nobody_waits_for_ever(work: list[tuple[str, int, int]]) -> None:
    """Whatever starts when, and however long it takes."""

    async def body() -> None:
        devices = Devices()
        turns = devices.turns()

        async def one(kind: str, delay: int, ticks: int) -> None:
            for _ in range(delay):
                await asyncio.sleep(0)
            await (devices.sample if kind == "sample" else devices.train)(turns, ticks)

        async with asyncio.timeout(10):
            await asyncio.gather(*(one(*item) for item in work))
        assert devices.moves[::2] == ["trainer"] * len(devices.moves[::2])
        assert devices.moves[1::2] == ["sampler"] * len(devices.moves[1::2])

    asyncio.run(body())


def test_sampling_that_runs_is_finished_and_what_comes_later_waits() -> None:
    """Three requests, one of them after the trainer asked: two hand-overs, not more."""

    async def body() -> list[str]:
        devices = Devices()
        turns = devices.turns()
        order: list[str] = []
        done = asyncio.Event()

        async def request(name: str) -> None:
            async with turns.sampling():
                await done.wait()
                order.append(name)

        async def train() -> None:
            async with turns.training():
                order.append("train")

        running = [asyncio.create_task(request(name)) for name in ("first", "second")]
        await asyncio.sleep(0.001)
        running.append(asyncio.create_task(train()))
        await asyncio.sleep(0.001)
        running.append(asyncio.create_task(request("third")))
        await asyncio.sleep(0.001)
        assert order == []
        done.set()
        await asyncio.gather(*running)
        assert devices.moves == ["trainer", "sampler"]
        assert turns.take_seconds() > 0.0
        assert turns.take_seconds() == 0.0
        return order

    assert asyncio.run(body()) == ["first", "second", "train", "third"]


def test_a_hand_over_outlives_who_asked_for_it() -> None:
    """A request that is cancelled meanwhile does not leave the devices half way."""

    async def body() -> None:
        devices = Devices()
        turns = devices.turns()
        await devices.train(turns, 1)
        devices.hold.clear()
        sampling = asyncio.create_task(devices.sample(turns, 1))
        await asyncio.sleep(0.001)
        sampling.cancel()
        training = asyncio.create_task(devices.train(turns, 1))
        await asyncio.sleep(0.001)
        devices.hold.set()
        await training
        assert sampling.cancelled()
        assert devices.moves == ["trainer", "sampler", "trainer"]

    asyncio.run(body())


def test_a_hand_over_that_fails_is_told_to_everybody() -> None:
    """Nobody computes on devices that are nobody's."""

    async def body() -> None:
        async def hand_over(side: Side) -> None:
            raise OSError(f"no memory for the {side}")

        turns = Turns(hand_over=hand_over, owner="sampler")
        for enter in (turns.training, turns.training, turns.sampling):
            with pytest.raises(OSError, match="no memory for the trainer"):
                async with enter():
                    pytest.fail("computed")

    asyncio.run(body())


def test_a_publish_leaves_the_devices_to_the_samplers_with_the_weights() -> None:
    """It waits for requests that run, and those that come later meet the new weights."""

    async def body() -> list[str]:
        devices = Devices()
        turns = devices.turns()
        order: list[str] = []
        done = asyncio.Event()

        async def request(name: str) -> None:
            async with turns.sampling():
                assert devices.owner == "sampler"
                await done.wait()
                order.append(name)

        async def load() -> None:
            assert devices.owner == "trainer"
            assert not devices.sampling
            await asyncio.sleep(0)
            devices.owner = "sampler"
            order.append("load")

        running = [asyncio.create_task(request("first"))]
        await asyncio.sleep(0.001)
        running.append(asyncio.create_task(turns.publish(load)))
        await asyncio.sleep(0.001)
        running.append(asyncio.create_task(request("second")))
        await asyncio.sleep(0.001)
        assert order == []
        done.set()
        await asyncio.gather(*running)
        assert devices.moves == ["trainer"]  # and back by `load`
        await devices.train(turns, 1)
        await turns.publish(load)  # the devices are the trainer's already
        await devices.sample(turns, 1)
        assert devices.moves == ["trainer", "trainer"]
        return order

    assert asyncio.run(body()) == ["first", "load", "second", "load"]


def test_a_publish_that_is_given_up_is_finished_first() -> None:
    """Whoever comes next finds the devices with one side; one that fails is told to everybody."""

    async def body() -> None:
        devices = Devices()
        turns = devices.turns()
        moving = asyncio.Event()

        async def load() -> None:
            await moving.wait()
            devices.owner = "sampler"

        publishing = asyncio.create_task(turns.publish(load))
        await asyncio.sleep(0.001)
        publishing.cancel()
        training = asyncio.create_task(devices.train(turns, 1))
        await asyncio.sleep(0.001)
        assert not training.done()
        moving.set()
        await training
        assert publishing.cancelled()
        assert devices.moves == ["trainer", "trainer"]

        async def fail() -> None:
            raise OSError("no sampler took the weights")

        for _ in range(2):
            with pytest.raises(OSError, match="no sampler took the weights"):
                await turns.publish(fail)
        with pytest.raises(OSError, match="no sampler took the weights"):
            await devices.sample(turns, 1)

    asyncio.run(body())
