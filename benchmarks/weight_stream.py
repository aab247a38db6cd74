"""Weights from one process to another by `WeightStream`, against the bare collective.

No sampler: the receiver copies every piece into tensors of its own, as a sampler's plan does. The
reference is measured in the same run by the same two processes: broadcasts of the bucket's halves,
and nothing else.

    ./run benchmarks/weight_stream.py --model qwen3-8b \
        --output benchmarks/results/weight_stream_8b_2xh200.json
    ./run benchmarks/weight_stream.py --model tiny --device cpu
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor
from update_models import SIZES, in_order, make_weights

from rl_contracts.rollout import PolicyVersion
from rollout_vllm.broadcast import BroadcastGroup
from rollout_vllm.stream_receiver import StreamReceiver
from rollout_vllm.torch_headers import tensor_headers, torch_dtype
from rollout_vllm.weights_stream import WeightStream

REPEATS = 20


def reference_s(*, rank: int, file: Path, device: torch.device, num_bytes: int) -> float:
    """Seconds of one broadcast of so many bytes: the median over some after a first one."""
    group = BroadcastGroup(rank=rank, num_members=2, file=file, device=device, timeout_s=60.0)
    content = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    times: list[float] = []
    for _ in range(6):
        begin = time.perf_counter()
        for _ in range(REPEATS):
            group.broadcast(0, content)
            group.wait(0)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append((time.perf_counter() - begin) / REPEATS)
    group.leave()
    return statistics.median(times[1:])


def receive(pipe: Connection, device: torch.device, file: Path, num_bytes: int) -> None:
    """The receiving process."""
    reference_s(rank=1, file=file, device=device, num_bytes=num_bytes)
    receiver = StreamReceiver(device)
    places: dict[str, Tensor] = {}
    while True:
        instructions: Mapping[str, object] | None = pipe.recv()
        if instructions is None:
            break
        with receiver.receive(instructions) as incoming:
            for name, header in incoming.tensors.items():
                if name not in places:
                    dtype = torch_dtype(header.dtype)
                    places[name] = torch.empty(header.shape, dtype=dtype, device=device)
            for pieces in incoming.buckets():
                targets = [
                    places[piece.name]
                    if piece.whole
                    else places[piece.name][piece.start : piece.start + piece.rows.shape[0]]
                    for piece in pieces
                ]
                torch._foreach_copy_(targets, [piece.rows for piece in pieces])
        pipe.send([float(tensor.double().sum()) for tensor in list(places.values())[-3:]])
    receiver.close()


def main() -> None:
    """Read arguments, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(SIZES), default="tiny")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--bucket-mib", type=int, default=1024)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    gpu = arguments.device == "cuda"
    here, there = (torch.device(name if gpu else "cpu") for name in ("cuda:1", "cuda:0"))
    half_bytes = arguments.bucket_mib * 2**19
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "group"
        process = context.Process(target=receive, args=(theirs, there, file, half_bytes))
        process.start()
        bare_s = reference_s(rank=0, file=file, device=here, num_bytes=half_bytes)
        weights = make_weights(SIZES[arguments.model], here, seed=1)
        headers = tensor_headers(weights.items(), dtype="bfloat16")
        reports = []
        with WeightStream(
            headers,
            dtype="bfloat16",
            device=here,
            carriage="broadcast",
            bucket_bytes=2 * half_bytes,
            timeout_s=60.0,
        ) as stream:
            for version in range(arguments.rounds):
                ours.send(stream.offer(PolicyVersion(version)).instructions())
                reports.append(stream.send(in_order(weights)))
                arrived = ours.recv()
                sent = [float(tensor.double().sum()) for tensor in list(weights.values())[-3:]]
                if arrived != sent:
                    raise AssertionError(f"sums differ: {arrived} came, {sent} was sent")
        ours.send(None)
        process.join(60)
    seconds = statistics.median(report.seconds for report in reports[1:])
    num_bytes = reports[0].num_bytes
    bare_total_s = bare_s * num_bytes / half_bytes
    results = {
        "model": arguments.model,
        "device": torch.cuda.get_device_name(0) if gpu else "cpu",
        "torch": torch.__version__,
        "num_tensors": len(headers),
        "gb": num_bytes / 1e9,
        "bucket_mib": arguments.bucket_mib,
        "bare_gb_per_s": half_bytes / bare_s / 1e9,
        "stream_gb_per_s": num_bytes / seconds / 1e9,
        "first_s": reports[0].seconds,
        "seconds": [report.seconds for report in reports[1:]],
        "times_bare": seconds / bare_total_s,
    }
    sys.stdout.write(json.dumps(results, indent=1) + "\n")
    sys.stdout.flush()
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
