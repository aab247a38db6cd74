"""Two real samplers in two actors of a real Ray on this machine, and their deaths.

    python ray_replicas_process.py FOLDER

Prints one line per check; the exit status is 1 if one failed. A process of its own, because Ray
and vLLM's children want a main module that can be imported.
"""

import asyncio
import os
import signal
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import ray
import torch
from ray.exceptions import RayTaskError
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from rl_contracts.rollout import Completion, PolicyVersion, SamplingParams
from rollout_vllm import VllmConfig
from rollout_vllm.remote_replica import RemoteReplica
from rollout_vllm.replica import ReplicaSetConfig, replica_config
from rollout_vllm.replicas import ReplicaSet
from rollout_vllm.sampler_host import SamplerHost

VOCAB_SIZE = 96
PROMPT = [5, 6, 7, 8, 9]
LONG = SamplingParams(max_new_tokens=400)


class RayRemote:
    """A `rollout_vllm.remote_replica.Remote`: a `SamplerHost` in an actor."""

    def __init__(self, handle: Any) -> None:  # noqa: ANN401  (Ray's are untyped)
        self.handle = handle

    def submit(self, method: str, *args: object, **kwargs: object) -> Awaitable[object]:
        call: Awaitable[object] = getattr(self.handle, method).remote(*args, **kwargs)
        return call

    def cancel(self, call: Awaitable[object]) -> None:
        ray.cancel(call)

    def raised(self, error: Exception) -> Exception | None:
        return error.cause if isinstance(error, RayTaskError) else None

    def end(self) -> None:
        ray.kill(self.handle)


class Started(NamedTuple):
    """A replica that was started, and its actor's process."""

    number: int
    process: int


def make_model(seed: int) -> PreTrainedModel:
    """About 150k parameters whose logits are far from uniform."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.15,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    model: PreTrainedModel = Qwen3ForCausalLM(config)
    return model.requires_grad_(requires_grad=False)


def weights_of(model: PreTrainedModel) -> list[tuple[str, torch.Tensor]]:
    """Weights under the names of the checkpoint."""
    return [(name, tensor.detach()) for name, tensor in model.named_parameters()]


def largest_difference(
    models: dict[int, PreTrainedModel], prompt: Sequence[int], completion: Completion
) -> float:
    """Between a completion's logprobs and those of the models that are said to have drawn it."""
    ids = torch.tensor([[*prompt, *completion.token_ids]])
    places = range(len(prompt) - 1, ids.shape[1] - 1)
    plain = {v: model(ids).logits[0].float().log_softmax(dim=-1) for v, model in models.items()}
    return max(
        abs(own - float(plain[int(version)][place, token]))
        for own, version, place, token in zip(
            completion.rollout_logprobs,
            completion.policy_versions,
            places,
            completion.token_ids,
            strict=True,
        )
    )


class Checks:
    """The checks of one set, in order; each raises, or returns what it saw."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = VllmConfig(
            model=str(folder),
            max_model_len=512,
            dtype="float32",
            max_num_seqs=8,
            kv_cache_gib=0.125,
            cpu_threads=1,
        )
        self.started: list[Started] = []
        self.models = {0: make_model(0)}
        self.one_at_a_time = asyncio.Lock()

    async def start_replica(self, number: int) -> RemoteReplica:
        """An actor with a sampler, beside those that are there."""
        handle = (
            ray.remote(SamplerHost)
            .options(num_cpus=1, max_restarts=0)
            .remote(replica_config(self.config, number), policy_version=PolicyVersion(0))
        )
        async with self.one_at_a_time:  # two cores are busy with one
            replica = await RemoteReplica.start(RayRemote(handle), name=f"replica {number}")
        assert replica.process is not None
        self.started.append(Started(number, replica.process))
        return replica

    def newest(self, number: int) -> Started:
        """The replica that has this number now."""
        return next(one for one in reversed(self.started) if one.number == number)

    async def drawn(self, replicas: ReplicaSet, num_prompts: int) -> list[asyncio.Task[Any]]:
        """That many long requests, all of them running."""
        tasks = [
            asyncio.create_task(replicas.sample([*PROMPT, i], num_samples=2, params=LONG))
            for i in range(10, 10 + num_prompts)
        ]
        await asyncio.sleep(0.1)  # far below what LONG takes, since no token ends a completion
        assert not all(task.done() for task in tasks)
        return tasks

    def check_all(self, groups: Sequence[list[Completion]]) -> set[int]:
        """Nothing is missing, and every token's logprob is that of its version; the versions."""
        seen: set[int] = set()
        for i, group in enumerate(groups, start=10):
            assert len(group) == 2
            for completion in group:
                assert completion.finish_reason in {"stop", "length"}
                assert largest_difference(self.models, [*PROMPT, i], completion) < 1e-4
                seen |= set(map(int, completion.policy_versions))
        return seen

    async def routing(self, replicas: ReplicaSet) -> str:
        """Both serve, each with a seed of its own, and many requests are spread over both."""
        assert replicas.num_serving == 2
        assert len({one.process for one in self.started} | {os.getpid()}) == 3
        groups = await asyncio.gather(*await self.drawn(replicas, 12))
        assert self.check_all(groups) == {0}
        drawn = {c.token_ids for group in groups for c in group}
        assert len(drawn) > 20
        return f"{len(drawn)} of 24 differ"

    async def refused(self, replicas: ReplicaSet) -> str:
        """Weights that one would refuse reach none."""
        wrong = weights_of(make_model(5))[1:]
        with pytest.raises(ValueError, match="is missing"):
            await replicas.load_weights(wrong, version=PolicyVersion(9))
        groups = await asyncio.gather(*await self.drawn(replicas, 4))
        assert self.check_all(groups) == {0}
        assert replicas.num_serving == 2
        assert not replicas.losses
        return "both still at version 0"

    async def update(self, replicas: ReplicaSet) -> str:
        """Requests in flight keep the version of each token; later ones have the new one."""
        self.models[1] = make_model(1)
        tasks = await self.drawn(replicas, 8)
        await replicas.load_weights(weights_of(self.models[1]), version=PolicyVersion(1))
        mixed = self.check_all(await asyncio.gather(*tasks))
        assert mixed == {0, 1}, mixed
        after = self.check_all(await asyncio.gather(*await self.drawn(replicas, 8)))
        assert after == {1}, after
        return "in flight 0 and 1, then 1"

    async def killed(self, replicas: ReplicaSet, number: int, process: int, *, reason: str) -> str:
        """Nothing is lost when a process dies, and its successor has the present version."""
        before, started = len(replicas.losses), len(self.started)
        tasks = await self.drawn(replicas, 12)
        os.kill(process, signal.SIGKILL)
        begin = time.monotonic()
        seen = self.check_all(await asyncio.gather(*tasks))
        answered = time.monotonic() - begin
        assert seen == {1}, seen
        async with asyncio.timeout(120):
            await replicas.until_all_serve()
        assert len(self.started) == started + 1
        assert self.started[-1].number == number
        (loss,) = replicas.losses[before:]
        assert loss.startswith(f"replica {number}: {reason}"), loss
        # both answer, and with the present weights: the new one was started with those before
        seen = self.check_all(await asyncio.gather(*await self.drawn(replicas, 12)))
        assert seen == {1}, seen
        assert {number for number, _ in self.started[-2:]} <= {0, 1}
        return f"24 of 24 in {answered:.1f} s ({loss.splitlines()[0][:90]})"

    async def actor_killed(self, replicas: ReplicaSet) -> str:
        """The process of an actor; the engine's process ends with it."""
        actor = self.newest(0).process
        engines = children(actor)
        assert engines
        outcome = await self.killed(replicas, 0, actor, reason="ReplicaLostError")
        assert not [process for process in engines if exists(process)]
        return outcome

    async def engine_killed(self, replicas: ReplicaSet) -> str:
        """The process of an engine; the actor that had it ends too."""
        actor = self.newest(1).process
        (engine, *_) = [process for process in children(actor) if "EngineCore" in title(process)]
        outcome = await self.killed(replicas, 1, engine, reason="SamplerDiedError")
        assert not exists(actor)
        return outcome

    async def next_update(self, replicas: ReplicaSet) -> str:
        """The successors take the next version as the others do."""
        self.models[2] = make_model(2)
        await replicas.load_weights(
            weights_of(self.models[2]), version=PolicyVersion(2), in_flight="abort"
        )
        seen = self.check_all(await asyncio.gather(*await self.drawn(replicas, 8)))
        assert seen == {2}, seen
        return "all at version 2"


def children(process: int) -> list[int]:
    """Processes that this one started."""
    found = Path(f"/proc/{process}/task").glob("*/children")
    return [int(child) for file in found for child in file.read_text().split()]


def exists(process: int) -> bool:
    """Whether it runs; a zombie does not."""
    return Path(f"/proc/{process}/cmdline").is_file() and bool(title(process))


def title(process: int) -> str:
    """What a process calls itself."""
    return Path(f"/proc/{process}/cmdline").read_text().replace("\0", " ")


async def report(title: str, check: Callable[[], Awaitable[str]]) -> bool:
    """Run one check and print its outcome; False if it failed."""
    begin = time.monotonic()
    try:
        line = f"ok      {title}: {await asyncio.wait_for(check(), 150)}"
    except Exception:  # noqa: BLE001  (printed and counted)
        line = f"FAILED  {title}: {traceback.format_exc(limit=-4)}"
    sys.stdout.write(f"{line}  [{time.monotonic() - begin:.1f} s]\n")
    sys.stdout.flush()
    return line.startswith("ok")


async def run(folder: Path) -> int:
    """All checks; 1 if one failed."""
    checks = Checks(folder)
    checks.models[0].save_pretrained(folder)
    settings = ReplicaSetConfig(num_replicas=2, health_interval_s=1.0)
    begin = time.monotonic()
    async with await ReplicaSet.start(
        checks.start_replica, settings, policy_version=PolicyVersion(0), dtype="float32"
    ) as replicas:
        sys.stdout.write(f"two replicas in {time.monotonic() - begin:.1f} s\n")
        named = [
            checks.routing,
            checks.refused,
            checks.update,
            checks.actor_killed,
            checks.engine_killed,
            checks.next_update,
        ]
        outcomes = [await report(check.__name__, partial(check, replicas)) for check in named]
    return 0 if all(outcomes) else 1


def main() -> int:
    """Start Ray on this machine alone, and run."""
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ray.init(
        address="local",
        num_cpus=4,  # for Ray's book-keeping
        include_dashboard=False,
        object_store_memory=100 * 2**20,
        log_to_driver=False,
        runtime_env={"env_vars": environment},
    )
    try:
        return asyncio.run(run(Path(sys.argv[1])))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    raise SystemExit(main())
