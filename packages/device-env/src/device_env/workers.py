"""Is the environment the same on every worker, and how it gets there.

What is exported in the shell that starts a run reaches the driver's processes only. On a Ray
cluster the variables travel in a runtime environment (`runtime_env`); each worker then says
what it has (`collect`), and `compare` names the node and the variable that differs.
"""

import platform
from collections.abc import Collection, Iterable, Mapping
from typing import final

import attrs

from device_env.environment_snapshot import snapshot
from device_env.registry import Registry

_VISIBLE = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ASCEND_RT_VISIBLE_DEVICES",
)
PER_WORKER: frozenset[str] = frozenset(
    {
        *_VISIBLE,
        "HCCL_IF_IP",
        "LOCAL_RANK",
        "RANK",
        "RAY_JOB_ID",
        "RAY_WORKER_ID",
        "SLURM_LOCALID",
        "SLURM_NODEID",
        "SLURM_PROCID",
        "SLURM_TASK_PID",
        "VLLM_DP_RANK",
        "VLLM_DP_RANK_LOCAL",
        "VLLM_HOST_IP",
        "VLLM_PORT",
    }
)
"""Variables that are different on every worker by their meaning."""

_COPIED_PREFIXES = (
    "VLLM_", "FLASH_ATTENTION_", "LMCACHE_", "NCCL_", "UCX_", "HF_", "HUGGING_FACE_",
)  # fmt: skip
_EXTRA = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"


@final
@attrs.frozen(kw_only=True)
class WorkerEnvironment:
    """What one worker process has in its environment; plain values that travel anywhere."""

    node: str
    """Host name of the node."""

    worker: str
    """What the worker is called in the run."""

    variables: Mapping[str, str]
    """The variables that can change what a run does, without secrets."""


@final
@attrs.frozen(kw_only=True)
class Difference:
    """A variable that is not the same everywhere."""

    variable: str
    """Its name."""

    groups: tuple[tuple[str | None, tuple[str, ...]], ...]
    """Each value, None for unset, with the workers that have it as `node/worker`; the value
    that most workers have first."""

    def __str__(self) -> str:
        """`HCCL_BUFFSIZE: unset on b/rollout-1, but '200' on a/rollout-0 and 2 others`."""
        (common, most), *odd = self.groups
        shown = "; ".join(f"{_value(value)} on {', '.join(workers)}" for value, workers in odd)
        rest = len(most) - 1
        others = f" and {rest} other{'s' if rest > 1 else ''}" if rest else ""
        return f"{self.variable}: {shown}, but {_value(common)} on {most[0]}{others}"


def collect(
    environ: Mapping[str, str],
    *,
    worker: str,
    node: str | None = None,
    registry: Registry | None = None,
) -> WorkerEnvironment:
    """What this process has in its environment, to be sent to the driver.

    Args:
        environ: normally `os.environ`.
        worker: what the worker is called in the run.
        node: the node it is on; by default the host name.
        registry: the facts, by default those that ship with this package.
    """
    return WorkerEnvironment(
        node=platform.node() if node is None else node,
        worker=worker,
        variables=snapshot(environ, registry=registry),
    )


def compare(
    environments: Iterable[WorkerEnvironment], *, ignore: Collection[str] = PER_WORKER
) -> tuple[Difference, ...]:
    """Variables that are not the same on all workers, by name.

    Args:
        environments: one per worker, the driver's own among them where it takes part.
        ignore: variables that may differ.
    """
    everywhere = tuple(environments)
    names = sorted({name for found in everywhere for name in found.variables} - set(ignore))
    differences: list[Difference] = []
    for name in names:
        groups: dict[str | None, list[str]] = {}
        for found in everywhere:
            place = f"{found.node}/{found.worker}"
            groups.setdefault(found.variables.get(name), []).append(place)
        if len(groups) > 1:
            ordered = sorted(groups.items(), key=lambda group: -len(group[1]))
            rows = tuple((value, tuple(places)) for value, places in ordered)
            differences.append(Difference(variable=name, groups=rows))
    return tuple(differences)


def runtime_env(variables: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """The `runtime_env` for `ray.init` or an actor that gives these variables to its workers.

    Worker processes of vLLM inherit from the engine's process where it starts them itself. Where
    vLLM starts them as Ray actors on other nodes it copies variables by prefix (vllm 0.32.0,
    vllm/ray/ray_env.py), which misses HCCL_*, OMP_* and others; those are named for it in
    VLLM_RAY_EXTRA_ENV_VARS_TO_COPY, in addition to what is named there already.

    Raises:
        ValueError: a visible-devices variable is among them; Ray sets it for each worker.
    """
    chosen = sorted(variables.keys() & set(_VISIBLE))
    if chosen:
        message = (
            f"runtime_env: {', '.join(chosen)} would give every worker the same devices, and Ray "
            "chooses them for each; ask Ray for num_gpus or resources instead"
        )
        raise ValueError(message)
    named = {part.strip() for part in variables.get(_EXTRA, "").split(",") if part.strip()}
    named |= {name for name in variables if not name.startswith(_COPIED_PREFIXES)}
    extra = {_EXTRA: ",".join(sorted(named))} if named else {}
    return {"env_vars": {**variables, **extra}}


def _value(value: str | None) -> str:
    return "unset" if value is None else repr(value)
