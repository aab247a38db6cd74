"""Weights from one process to others through a bucket: all of them, in time, or not at all."""

import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from rl_contracts.rollout import PolicyVersion
from rollout_vllm.buckets import checksum
from rollout_vllm.headers import TensorHeader
from rollout_vllm.offered import OfferedWeights, offered_together
from rollout_vllm.stream_receiver import StreamReceiver
from rollout_vllm.stream_wire import receive_message, send_message
from rollout_vllm.torch_headers import tensor_headers
from rollout_vllm.weights_check import check_published
from rollout_vllm.weights_stream import Carriage, WeightStream

CPU = torch.device("cpu")
T = TypeVar("T")


def weights(seed: int) -> dict[str, Tensor]:
    """A matrix larger than half a bucket, a transposed one, a scalar, integers, a stack."""
    torch.manual_seed(seed)
    return {
        "embed": torch.randn(1000, 16),
        "transposed": torch.randn(7, 5).T,
        "scalar": torch.randn(()),
        "integers": torch.arange(seed, seed + 5),
        "stack": torch.randn(4, 64, 64),
    }


def stream(
    *,
    carriage: Carriage = "shared",
    timeout_s: float = 20.0,
    checksums: bool = False,
) -> WeightStream:
    """A stream of `weights` in bfloat16 with a bucket of 32 KiB."""
    return WeightStream(
        tensor_headers(weights(0).items(), dtype="bfloat16"),
        dtype="bfloat16",
        device=CPU,
        carriage=carriage,
        bucket_bytes=2**15,
        timeout_s=timeout_s,
        checksums=checksums,
    )


def socket_of(offered: OfferedWeights) -> Path:
    """Where the only sender listens."""
    (path,) = offered.sockets.values()
    return path


def take(receiver: StreamReceiver, instructions: Mapping[str, object]) -> dict[str, Tensor]:
    """What an engine's process gets."""
    taken: dict[str, Tensor] = {}
    with receiver.receive(instructions) as incoming:
        for pieces in incoming.buckets():
            for piece in pieces:
                shape = incoming.tensors[piece.name].shape
                whole = taken.setdefault(piece.name, torch.empty(shape, dtype=piece.rows.dtype))
                if piece.whole:
                    whole.copy_(piece.rows)
                else:
                    whole[piece.start : piece.start + piece.rows.shape[0]] = piece.rows
    return taken


def in_thread(work: Callable[[], T]) -> "Future[T]":
    """Run it beside the test."""
    executor = ThreadPoolExecutor(1)
    future = executor.submit(work)
    executor.shutdown(wait=False)
    return future


@pytest.mark.parametrize("carriage", ["shared", "broadcast"])
@pytest.mark.parametrize("num_receivers", [1, 2])
def test_every_value_arrives(carriage: Carriage, num_receivers: int) -> None:
    """Cast to the sampler's type, cut where the bucket ends, version after version."""
    receivers = [StreamReceiver(CPU) for _ in range(num_receivers)]
    with stream(carriage=carriage, checksums=True) as sender:
        for version in (1, 2):
            sent = weights(version)
            offered = sender.offer(PolicyVersion(version))
            instructions = offered.instructions()
            taking = [in_thread(partial(take, receiver, instructions)) for receiver in receivers]
            report = sender.send(sent.items(), num_receivers=num_receivers)
            for future in taking:
                taken = future.result()
                assert set(taken) == set(sent)
                for name, tensor in sent.items():
                    cast = tensor.bfloat16() if tensor.is_floating_point() else tensor
                    assert torch.equal(taken[name], cast), name
            # (1000 x 16 + 35 + 1 + 4 x 64 x 64) x 2 bytes and 5 x 8
            assert report.num_bytes == 64_880
            assert report.num_buckets == 4  # 512 rows; 488 and the small ones; 2 x 2 of the stack
    for receiver in receivers:
        receiver.close()


def test_nothing_is_left_behind() -> None:
    """The folder goes with the stream; what an offer and the memory are found by, even before."""
    sender = stream()
    earlier = sender.offer(PolicyVersion(0))
    folder = socket_of(earlier).parent
    instructions = sender.offer(PolicyVersion(1)).instructions()
    taking = in_thread(lambda: take(StreamReceiver(CPU), instructions))
    sender.send(weights(1).items())
    taking.result()
    assert not list(folder.iterdir())
    sender.close()
    sender.close()
    assert not folder.exists()


def test_the_export_goes_on_while_a_half_is_loaded() -> None:
    """The receiver holds the first half; the sender exports until both halves are full."""
    asked: list[str] = []
    holding, release = threading.Event(), threading.Event()

    def export() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights(1).items():
            asked.append(name)
            yield name, tensor

    def take_slowly() -> None:
        with StreamReceiver(CPU).receive(instructions) as incoming:
            for place, _ in enumerate(incoming.buckets()):
                if place == 0:
                    holding.set()
                    assert release.wait(20)

    with stream() as sender:
        instructions = sender.offer(PolicyVersion(1)).instructions()
        taking = in_thread(take_slowly)
        sending = in_thread(lambda: sender.send(export()))
        assert holding.wait(20)
        # 512 rows of the first tensor fill the first half; its other 488 and the small ones lie
        # in the second, into which the stack does not fit
        while asked[-1] != "stack":
            assert not sending.done()
        assert not release.is_set()
        release.set()
        taking.result()
        assert sending.result().num_buckets == 4


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"stack": None}, "'stack' and 0 more did not come"),
        ({"extra": torch.ones(1)}, "'extra' is not in WeightStream's `tensors`"),
        ({"scalar": torch.ones(2)}, r"'scalar': expected shape \[\] and type BF16, got \[2\]"),
        ({"integers": torch.ones(5)}, r"'integers': expected shape \[5\] and type I64"),
    ],
)
def test_an_export_that_is_not_what_was_announced(
    wrong: dict[str, Tensor | None], text: str
) -> None:
    """The sender says what came, and the receiver hears why it must give up."""
    changed = {**weights(1), **wrong}
    sent = [(name, tensor) for name, tensor in changed.items() if tensor is not None]
    with stream() as sender:
        offered = sender.offer(PolicyVersion(1))
        taking = in_thread(lambda: take(StreamReceiver(CPU), offered.instructions()))
        with pytest.raises(ValueError, match=text):
            sender.send(sent)
        with pytest.raises(ConnectionError, match=f"the other half failed: .*{text}"):
            taking.result()


def test_a_changed_bucket_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With checksums a bucket that is not what was sent is refused, and the sender told."""
    monkeypatch.setattr("rollout_vllm.carriers.checksum", lambda memory: checksum(memory) + 1)
    with stream(checksums=True) as sender:
        offered = sender.offer(PolicyVersion(1))
        taking = in_thread(lambda: take(StreamReceiver(CPU), offered.instructions()))
        with pytest.raises(ConnectionError, match="bytes changed on its way: checksum"):
            sender.send(weights(1).items())
        with pytest.raises(ValueError, match="bytes changed on its way: checksum"):
            taking.result()


def test_a_checksum_depends_on_places() -> None:
    """Swapping two words, or bytes of the rest, is seen; equal bytes have equal sums."""
    memory = torch.arange(83, dtype=torch.uint8)
    swapped = memory.clone()
    swapped[0:8], swapped[8:16] = memory[8:16], memory[0:8]
    rest = memory.clone()
    rest[81], rest[82] = memory[82], memory[81]
    assert checksum(memory) == checksum(memory.clone())
    assert len({checksum(memory), checksum(swapped), checksum(rest)}) == 3


def test_a_refusal_reaches_the_sender(tmp_path: Path) -> None:
    """What the sampler checks before the first byte ends the sender's wait with the reason."""
    model = {name: TensorHeader("BF16", (1,)) for name in weights(0)}
    with stream() as sender:
        offered = sender.offer(PolicyVersion(3))
        with pytest.raises(ValueError, match=r"version 3 do not fit .*'embed' has shape") as error:
            check_published(offered, model=model, dtype="bfloat16", tied=False)
        refusing = in_thread(lambda: offered.refuse(str(error.value)))
        with pytest.raises(ValueError, match=r"the sampler refused the weights: .*'embed' has sh"):
            sender.send(weights(1).items())
        refusing.result()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("carriage", ["shared", "broadcast"])
def test_receivers_come_and_go_between_versions(carriage: Carriage) -> None:
    """Two take a version, one of them alone takes it again, and both take the next.

    Whichever of them it is: the first one's place would be right in a group of two as well.
    """
    receivers = [StreamReceiver(CPU) for _ in range(2)]
    first, second = receivers[:1], receivers[1:]
    with stream(carriage=carriage) as sender:
        for version, present in enumerate((receivers, second, receivers, first, first, receivers)):
            instructions = sender.offer(PolicyVersion(version)).instructions()
            taking = [in_thread(partial(take, receiver, instructions)) for receiver in present]
            sender.send(weights(version).items(), num_receivers=len(present))
            for future in taking:
                assert torch.equal(future.result()["embed"], weights(version)["embed"].bfloat16())
    for receiver in receivers:
        receiver.close()


def test_a_late_answer_is_not_one_to_the_next_offer() -> None:
    """A refusal of version 1 that arrives after version 2 was offered harms nobody."""
    with stream() as sender:
        first = sender.offer(PolicyVersion(1))
        second = sender.offer(PolicyVersion(2))
        first.refuse("too late")
        taking = in_thread(lambda: take(StreamReceiver(CPU), second.instructions()))
        sender.send(weights(2).items())
        assert torch.equal(taking.result()["embed"], weights(2)["embed"].bfloat16())


def test_a_receiver_that_does_not_come_is_named() -> None:
    """The wait is bounded, and the message says who waited for whom."""
    with stream(timeout_s=0.05) as sender:
        with pytest.raises(RuntimeError, match="expected a call of `offer` before each `send`"):
            sender.send(weights(1).items())
        sender.offer(PolicyVersion(4))
        with pytest.raises(
            TimeoutError, match=r"version 4: receiver 1 of 1 did not come within 0.05 s; does a sa"
        ):
            sender.send(weights(1).items())


def test_a_receiver_that_dies_ends_the_sending() -> None:
    """A connection that closes in the middle is an error at once, not a wait."""

    def die() -> None:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(socket_of(offered)))
            hello = {"process": 1, "device": "cpu", "group": None, "rank": None}
            send_message(connection, "hello", hello)
            receive_message(connection, "update")

    with stream() as sender:
        offered = sender.offer(PolicyVersion(1))
        dying = in_thread(die)
        with pytest.raises(ConnectionError):
            sender.send(weights(1).items())
        dying.result()


def test_a_sender_that_dies_ends_the_receiving() -> None:
    """No weight is awaited from a sender that is gone."""
    sender = stream()
    offered = sender.offer(PolicyVersion(1))
    sender.close()
    with pytest.raises(OSError, match="No such file"):
        take(StreamReceiver(CPU), offered.instructions())
    offered.refuse("nobody is there to hear it")


def test_settings_that_cannot_work_are_refused() -> None:
    """A bucket must hold a row, and the other device is named."""
    tensors = {"wide": TensorHeader("F32", (2, 4096))}
    with pytest.raises(ValueError, match=r"bucket_bytes of 16896 or more \(a row of 'wide' must"):
        WeightStream(tensors, dtype="bfloat16", device=CPU, bucket_bytes=2**13)
    with pytest.raises(ValueError, match="expected timeout_s above 0, got 0"):
        WeightStream(tensors, dtype="bfloat16", device=CPU, timeout_s=0.0)
    with stream() as sender:
        sender.offer(PolicyVersion(1))
        with pytest.raises(ValueError, match="expected num_receivers of 1 or more, got 0"):
            sender.send(weights(1).items(), num_receivers=0)
    with pytest.raises(ValueError, match="version of 0 or more, got -1"), stream() as sender:
        sender.offer(PolicyVersion(-1))


def test_each_worker_takes_from_the_sender_on_its_own_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two ranks of a trainer, two workers of an engine; a worker on a third device is named."""
    here = threading.local()
    monkeypatch.setattr("rollout_vllm.weights_stream.device_name", lambda _: here.name)
    monkeypatch.setattr("rollout_vllm.stream_receiver.device_name", lambda _: here.name)

    def on(device: str, work: Callable[[], T]) -> T:
        here.name = device
        return work()

    with ExitStack() as stack:
        senders = {name: stack.enter_context(stream()) for name in ("cuda A", "cuda B")}
        offers = [
            on(name, partial(sender.offer, PolicyVersion(1))) for name, sender in senders.items()
        ]
        with pytest.raises(ValueError, match="expected one sender on each device, got two on cuda"):
            offered_together([offers[0], offers[0]])
        later = on("cuda B", partial(senders["cuda B"].offer, PolicyVersion(2)))
        with pytest.raises(ValueError, match=r"the same weights, got version 1 .* and version 2"):
            offered_together([offers[0], later])
        offers[1] = on("cuda B", partial(senders["cuda B"].offer, PolicyVersion(1)))
        instructions = offered_together(offers).instructions()
        taking = [
            in_thread(partial(on, name, partial(take, StreamReceiver(CPU), instructions)))
            for name in senders
        ]
        sending = [
            in_thread(partial(on, name, partial(sender.send, weights(place).items())))
            for place, (name, sender) in enumerate(senders.items())
        ]
        for place, future in enumerate(taking):
            assert torch.equal(future.result()["embed"], weights(place)["embed"].bfloat16())
        for report in sending:
            assert report.result().num_buckets == 4
        with pytest.raises(
            ConnectionError, match=r"runs on cuda C, senders wait on cuda A, cuda B; give WeightStr"
        ):
            on("cuda C", partial(take, StreamReceiver(CPU), instructions))
