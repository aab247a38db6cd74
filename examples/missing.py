"""What a job needs of a machine, and the machine lacks: said before anything starts."""

import math
import shutil
from pathlib import Path

from conduct import Job, shared_memory
from plan_memory import DTYPE_BYTES

from rl_contracts.pretrained import folder_shapes


def what_is_missing(job: Job) -> list[str]:
    """Files and room that the job needs and this machine lacks, a sentence each."""
    missing = [
        f"expected the file {path}, and there is none" for path in job.needs if not path.is_file()
    ]
    # Two versions of the weights: one is taken while the next is written.
    needed = 2 * num_weights(Path(job.sampler.model)) * DTYPE_BYTES[job.sampler.dtype]
    free = shutil.disk_usage(shared_memory()).free
    if needed > free:
        missing.append(
            f"weights pass from the trainer to the samplers through {shared_memory()}, where "
            f"{free / 2**30:.3g} GiB are free and two versions of {job.sampler.model} take about "
            f"{needed / 2**30:.3g}; enlarge it (docker: --shm-size)"
        )
    return missing


def num_weights(folder: Path) -> int:
    """Numbers in the weights of a model's folder; 0 if it holds none."""
    if not any(folder.glob("*.safetensors")):
        return 0
    return sum(map(math.prod, folder_shapes(folder).values()))
