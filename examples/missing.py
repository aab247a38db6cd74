"""What a job needs of a machine, and the machine lacks: said before anything starts."""

import math
import shutil
from pathlib import Path

from conduct import Job, shared_memory
from plan_memory import DTYPE_BYTES
from safetensors import safe_open


def what_is_missing(job: Job) -> list[str]:
    """Files and room that the job needs and this machine lacks, a sentence each."""
    missing = [
        f"expected the file {path}, and there is none" for path in job.needs if not path.is_file()
    ]
    # Two versions of the weights: one is taken while the next is written.
    files = Path(job.sampler.model).glob("*.safetensors")
    needed = 2 * sum(map(num_elements, files)) * DTYPE_BYTES[job.sampler.dtype]
    free = shutil.disk_usage(shared_memory()).free
    if needed > free:
        missing.append(
            f"weights pass from the trainer to the samplers through {shared_memory()}, where "
            f"{free / 2**30:.3g} GiB are free and two versions of {job.sampler.model} take about "
            f"{needed / 2**30:.3g}; enlarge it (docker: --shm-size)"
        )
    return missing


def num_elements(path: Path) -> int:
    """Of all tensors in a safetensors file; reads its header alone."""
    with safe_open(path, framework="np") as file:
        return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
