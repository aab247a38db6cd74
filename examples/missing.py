"""What a job needs of a machine, and the machine lacks: said before anything starts."""

import math
import shutil
from pathlib import Path

from conduct import Job, shared_memory
from plan_memory import DTYPE_BYTES

from rl_contracts.pretrained import folder_shapes
from rollout_vllm.weights_stream import BUCKET_BYTES


def what_is_missing(job: Job) -> list[str]:
    """Files and room that the job needs and this machine lacks, a sentence each."""
    missing = [
        f"expected the file {path}, and there is none" for path in job.needs if not path.is_file()
    ]
    if job.sampler.device != "cpu":
        return missing  # weights never leave the devices
    size = num_weights(Path(job.sampler.model)) * DTYPE_BYTES[job.sampler.dtype]
    needed = min(size, BUCKET_BYTES)
    free = shutil.disk_usage(shared_memory()).free
    if needed > free:
        missing.append(
            f"on CPUs weights pass from the trainer to the samplers through a bucket in "
            f"{shared_memory()}, where {free / 2**30:.3g} GiB are free; for "
            f"{job.sampler.model} it takes {needed / 2**30:.3g}; enlarge it (docker: --shm-size)"
        )
    return missing


def num_weights(folder: Path) -> int:
    """Numbers in the weights of a model's folder; 0 if it holds none."""
    if not any(folder.glob("*.safetensors")):
        return 0
    return sum(map(math.prod, folder_shapes(folder).values()))
