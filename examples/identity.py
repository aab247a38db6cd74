"""What must be the same for a run to go on as the same run."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from conduct import Job
from grpo import LoopConfig, Task

from async_policy import JsonValue
from rl_tasks import EncodedProblem

SAMPLE_BYTES = 2**20
"""Of a file of weights, at each place that is looked at."""


def identity(job: Job, loop: LoopConfig, task: Task) -> dict[str, JsonValue]:
    """What must be the same for a run to go on as the same run."""
    return {
        "problems": digest(task.train),
        "held-out problems": digest(task.heldout),
        "loop.seed": loop.seed,
        "loop.groups_per_step": loop.groups_per_step,
        "loop.group_size": loop.group_size,
        "model": model_digest(Path(job.sampler.model)),
        "trainer ranks": job.parallel.world_size,
    }


def model_digest(folder: Path) -> str:
    """A short text that differs for another model, and for other weights of the same shapes.

    A mebibyte of each file's beginning, middle and end is looked at, so that it costs nothing.
    """
    found = hashlib.blake2b((folder / "config.json").read_bytes(), digest_size=8)
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        found.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for place in (0, size // 2, max(0, size - SAMPLE_BYTES)):
                file.seek(place)
                found.update(file.read(SAMPLE_BYTES))
    return found.hexdigest()


def images(problem: EncodedProblem) -> list[str]:
    """One short text for each image of a prompt."""
    return [hashlib.blake2b(each, digest_size=8).hexdigest() for each in problem.problem.images]


def digest(problems: Sequence[EncodedProblem]) -> str:
    """A short text that differs for other problems, another order, images or chat template."""
    text = json.dumps([(p.problem.problem_id, p.prompt_ids, *images(p)) for p in problems])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
