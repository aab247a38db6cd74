"""A weight update of the sampler: from the first export to the first token, and where time goes.

The trainer is a set of random tensors under Hugging Face names, in this process; the sampler's
engine runs in another one, with a model of the same sizes. The reference is measured in the same
run: the same tensors copied into such a bucket and out of it by one process alone (`shared`; for
18,867 tensors that is mostly the building of their views), or NCCL's own broadcast of such buckets
(`broadcast`). Prints JSON.

    ./run benchmarks/weight_update.py --model qwen3-30b-a3b --compare \
        --output benchmarks/results/weight_update_30b_a3b_h200.json
    ./run benchmarks/weight_update.py --model qwen3-8b --carriage broadcast
    ./run benchmarks/weight_update.py --model tiny --device cpu
"""

import argparse
import asyncio
import json
import platform
import statistics
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import torch
from torch import Tensor
from update_models import SIZES, in_order, make_weights, write_folder

from rl_contracts.rollout import PolicyVersion, SamplingParams
from rollout_vllm import VllmConfig, VllmSampler
from rollout_vllm.torch_headers import tensor_headers
from rollout_vllm.weights_stream import WeightStream

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
GIB = 2**30


class MemoryWatch:
    """The most that was in use on a GPU while it ran, by whomever, above what was at its start."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._before = self._used()
        self.most = 0

    def _used(self) -> int:
        if self._device.type != "cuda":
            return 0
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self.most = max(self.most, self._used() - self._before)

    def __enter__(self) -> Self:
        """Begin."""
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """End."""
        self._stop.set()
        self._thread.join()


def synchronise(device: torch.device) -> None:
    """Wait for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def bare_copy_s(weights: Mapping[str, Tensor], bucket_bytes: int, device: torch.device) -> float:
    """Every tensor into a bucket and out of it, by this process alone; seconds."""
    half = torch.empty(bucket_bytes // 2, dtype=torch.uint8, device=device)
    stacks: list[list[Tensor]] = [[]]
    used = 0
    for tensor in weights.values():
        num_bytes = tensor.numel() * tensor.element_size()
        if used + num_bytes > half.numel() and stacks[-1]:
            stacks.append([])
            used = 0
        stacks[-1].append(tensor)
        used += num_bytes
    times: list[float] = []
    for _ in range(3):
        synchronise(device)
        begin = time.perf_counter()
        for stack in stacks:
            for target, source in ((0, 1), (1, 0)):
                sides = _sides(half, stack)
                torch._foreach_copy_(sides[target], sides[source])
        synchronise(device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _sides(half: Tensor, stack: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    inside: list[Tensor] = []
    outside: list[Tensor] = []
    used = 0
    for tensor in stack:
        rows = max(1, (half.numel() - used) // max(1, tensor[0].numel() * tensor.element_size()))
        part = tensor[:rows] if tensor.ndim else tensor[None]
        num_bytes = part.numel() * part.element_size()
        inside.append(half[used : used + num_bytes].view(part.dtype).view(part.shape))
        outside.append(part)
        used += -(-num_bytes // 256) * 256
        if used >= half.numel():
            break
    return inside, outside


def nccl_bytes_per_second(num_bytes: int) -> float:
    """NCCL's own broadcast from one GPU to the other, in this process."""
    sides = [torch.empty(num_bytes, dtype=torch.uint8, device=f"cuda:{i}") for i in (1, 0)]
    rates: list[float] = []
    for _ in range(10):
        for side in sides:
            torch.cuda.synchronize(side.device)
        begin = time.perf_counter()
        for _ in range(10):
            torch.cuda.nccl.broadcast(sides)
        for side in sides:
            torch.cuda.synchronize(side.device)
        rates.append(10 * num_bytes / (time.perf_counter() - begin))
    return statistics.median(rates)


async def one_update(
    sampler: VllmSampler, stream: WeightStream, weights: Mapping[str, Tensor], version: int
) -> dict[str, object]:
    """One update and the first token after it."""
    engine = sampler._engine  # noqa: SLF001  (its steps are timed one by one)
    begin = time.perf_counter()
    offered = stream.offer(PolicyVersion(version))
    loading = asyncio.create_task(sampler.load_published(offered))
    report = await asyncio.to_thread(stream.send, in_order(weights))
    sent = time.perf_counter()
    await loading
    loaded = time.perf_counter()
    params = SamplingParams(max_new_tokens=1, temperature=0.0)
    await sampler.sample(PROMPT, num_samples=1, params=params)
    first_token = time.perf_counter()
    (inside,) = await engine._engine._engine.collective_rpc("rollout_update_report")  # type: ignore[attr-defined]  # noqa: SLF001
    return {
        "total_s": first_token - begin,
        "until_sent_s": sent - begin,
        "sending_s": report.seconds,
        "of_which_sender_waited_s": report.waited_s,
        "until_resumed_s": loaded - begin,
        "first_token_s": first_token - loaded,
        "num_buckets": report.num_buckets,
        "gib": report.num_bytes / GIB,
        "engine": inside,
    }


async def logprobs(sampler: VllmSampler) -> tuple[float, ...]:
    """Of 32 greedy tokens: equal weights, equal kernels, equal numbers."""
    params = SamplingParams(max_new_tokens=32, temperature=0.0)
    (completion,) = await sampler.sample(PROMPT, num_samples=1, params=params)
    return completion.rollout_logprobs


async def compare_with_own_reload(
    sampler: VllmSampler,
    stream: WeightStream,
    weights: dict[str, Tensor],
    in_place: tuple[float, ...],
) -> dict[str, object]:
    """The same weights by vLLM's own reload: how long it takes, and whether logprobs are equal.

    Then one element of one norm, in place: the logprobs must move, and come back.
    """
    engine = sampler._engine._engine._engine  # type: ignore[attr-defined]  # noqa: SLF001
    version = sampler.policy_version
    await engine.collective_rpc("rollout_allow_in_place", args=(False,))
    own = await one_update(sampler, stream, weights, version + 1)
    equal = await logprobs(sampler) == in_place
    await engine.collective_rpc("rollout_allow_in_place", args=(True,))
    name = "model.norm.weight"
    changed = {**weights, name: weights[name].clone()}
    changed[name][0] += 4.0
    await one_update(sampler, stream, changed, version + 2)
    moved = await logprobs(sampler) != in_place
    await one_update(sampler, stream, weights, version + 3)
    back = await logprobs(sampler) == in_place
    return {
        "own_reload": own,
        "own_reload_gives_equal_logprobs": equal,
        "one_changed_element_moves_logprobs": moved,
        "logprobs_come_back": back,
    }


async def run(arguments: argparse.Namespace, folder: Path) -> dict[str, object]:
    """All rounds."""
    sizes = SIZES[arguments.model]
    broadcast = arguments.carriage == "broadcast"
    gpu = arguments.device == "cuda"
    device = torch.device(("cuda:1" if broadcast else "cuda:0") if gpu else "cpu")
    weights = make_weights(sizes, device, seed=1)
    headers = tensor_headers(weights.items(), dtype="bfloat16")
    write_folder(folder, sizes, headers)
    config = VllmConfig(
        model=str(folder),
        device=arguments.device,
        dtype="bfloat16",
        load_format="dummy",
        max_model_len=1024,
        max_num_seqs=64,
        kv_cache_gib=None if gpu else 0.25,
        # beside the trainer's tensors: half of an H200 holds 30B parameters and 5 GiB of cache
        gpu_memory_utilization=(0.5 if sizes.experts else 0.25) if gpu else None,
        enforce_eager=None if arguments.graphs else True,
    )
    bucket_bytes = arguments.bucket_mib * 2**20
    results: dict[str, object] = {
        "model": arguments.model,
        "carriage": arguments.carriage,
        "device": torch.cuda.get_device_name(0) if gpu else platform.processor() or "cpu",
        "torch": torch.__version__,
        "num_tensors": len(headers),
        "bucket_mib": arguments.bucket_mib,
        "graphs": arguments.graphs,
    }
    if gpu and broadcast:
        results["nccl_gb_per_s"] = nccl_bytes_per_second(bucket_bytes // 2) / 1e9
    else:
        results["bare_copy_s"] = bare_copy_s(weights, bucket_bytes, device)
    async with await VllmSampler.start(config, policy_version=PolicyVersion(0)) as sampler:
        params = SamplingParams(max_new_tokens=8, temperature=0.0)
        await sampler.sample(PROMPT, num_samples=1, params=params)
        with (
            WeightStream(
                headers,
                dtype="bfloat16",
                device=device,
                carriage=arguments.carriage,
                bucket_bytes=bucket_bytes,
            ) as stream,
            MemoryWatch(torch.device("cuda:0") if gpu else device) as watch,
        ):
            rounds = [
                await one_update(sampler, stream, weights, version)
                for version in range(1, arguments.rounds + 1)
            ]
            extra_memory = watch.most
            print(json.dumps(rounds[-1]), flush=True)
            in_place = await logprobs(sampler)
            if arguments.compare:
                results |= await compare_with_own_reload(sampler, stream, weights, in_place)
    results["first_round"] = rounds[0]
    results["rounds"] = rounds[1:]
    totals = [float(str(one["total_s"])) for one in rounds[1:]]
    sendings = [float(str(one["sending_s"])) for one in rounds[1:]]
    results["median_total_s"] = statistics.median(totals)
    results["median_sending_s"] = statistics.median(sendings)
    results["extra_memory_mib"] = extra_memory / 2**20
    gigabytes = float(str(rounds[0]["gib"])) * GIB / 1e9
    if "nccl_gb_per_s" in results:
        at_nccl = gigabytes / float(str(results["nccl_gb_per_s"]))
        results["times_nccl"] = statistics.median(sendings) / at_nccl
    return results


def main() -> None:
    """Read arguments, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(SIZES), default="tiny")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--carriage", choices=("shared", "broadcast"), default="shared")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bucket-mib", type=int, default=1024)
    parser.add_argument("--graphs", action="store_true", help="let vLLM compile and capture graphs")
    parser.add_argument("--compare", action="store_true", help="with vLLM's own reload too")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = asyncio.run(run(arguments, Path(folder)))
    print(json.dumps({key: value for key, value in results.items() if key != "rounds"}, indent=1))
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
