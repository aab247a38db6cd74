"""Profiles by device and recipe.

Only values whose reason is known are set; where nothing is known that a kind of device needs
for a recipe, nothing is set.
"""

from collections.abc import Mapping
from typing import Literal, final, get_args

import attrs

from device_env.device import DeviceKind
from device_env.profile import Profile, Setting, layered, thread_profile
from device_env.rules import RunFacts

RecipeName = Literal["rollout", "colocated-rl", "disaggregated-rl", "reproducible-rl"]
"""What a run does with its devices."""

RECIPE_NAMES: tuple[RecipeName, ...] = get_args(RecipeName)
"""In the order in which the command line lists them."""

_TORCH_NPU = "torch_npu documentation"
_CANN = "CANN 8.5 reference"

_SPAWN = Setting(
    name="VLLM_WORKER_MULTIPROC_METHOD",
    value="spawn",
    reason="a process that has touched its device cannot fork workers that use it",
    source="CUDA programming guide, and vllm 0.32.0, vllm/utils/system_utils.py",
)
_NO_NZ = Setting(
    name="VLLM_ASCEND_ENABLE_NZ",
    value="0",
    reason="new weights cannot be written in place into the NZ layout that 1 casts weights to",
    source="vllm-ascend, docs/source/user_guide/configuration/additional_config.md",
)
_DEVICE_SETTINGS: Mapping[DeviceKind, tuple[Setting, ...]] = {
    "cuda": (_SPAWN,),
    "rocm": (_SPAWN,),
    "npu": (
        _SPAWN,
        Setting(
            name="TASK_QUEUE_ENABLE",
            value="1",
            reason="captured graphs need 1; 2 raises peak memory and excludes them",
            source=f"{_TORCH_NPU}, TASK_QUEUE_ENABLE",
        ),
        Setting(
            name="HCCL_CONNECT_TIMEOUT",
            value="1500",
            reason="the default of 120 s is over before every rank has loaded a large model; "
            "torch's process groups wait 1800 s, which must be longer",
            source=f"{_CANN}, HCCL_CONNECT_TIMEOUT; {_TORCH_NPU}, HCCL_ASYNC_ERROR_HANDLING",
        ),
        Setting(
            name="HCCL_EXEC_TIMEOUT",
            value="1500",
            reason="the default of 1836 s outlasts torch's process groups (1800 s), which then "
            "give up before HCCL can name the operation that hangs",
            source=f"{_CANN}, HCCL_EXEC_TIMEOUT; {_TORCH_NPU}, HCCL_ASYNC_ERROR_HANDLING",
        ),
    ),
    "cpu": (),
}
_SHARED_NPU = tuple(
    Setting(
        name=name,
        value="auto",
        reason="trainer and sampler are processes on the same NPU and need ports of their own",
        source=f"{_CANN}, {name}",
    )
    for name in ("HCCL_HOST_SOCKET_PORT_RANGE", "HCCL_NPU_SOCKET_PORT_RANGE")
)
_BATCH_INVARIANT = Setting(
    name="VLLM_BATCH_INVARIANT",
    value="1",
    reason="a completion does not depend on what else is in its batch",
    source="vLLM documentation, Batch Invariance",
)
_REPRODUCIBLE: Mapping[DeviceKind, tuple[Setting, ...]] = {
    "cuda": (
        _BATCH_INVARIANT,
        Setting(
            name="CUBLAS_WORKSPACE_CONFIG",
            value=":4096:8",
            reason="cuBLAS chooses among algorithms by free workspace unless its size is fixed",
            source="torch documentation, Reproducibility",
        ),
    ),
    "rocm": (_BATCH_INVARIANT,),
    "npu": (
        Setting(
            name="HCCL_DETERMINISTIC",
            value="true",
            reason="reductions add in a fixed order",
            source=f"{_CANN}, HCCL_DETERMINISTIC",
        ),
        Setting(
            name="LCCL_DETERMINISTIC",
            value="1",
            reason="the same for reductions within a node",
            source=f"{_CANN}, LCCL_DETERMINISTIC",
        ),
        Setting(
            name="ATB_MATMUL_SHUFFLE_K_ENABLE",
            value="0",
            reason="matrix products add in a fixed order",
            source=f"{_CANN}, ATB_MATMUL_SHUFFLE_K_ENABLE",
        ),
    ),
    "cpu": (),
}


@final
@attrs.frozen(kw_only=True)
class Recipe:
    """What a run does with its devices, and what that asks of the environment."""

    name: RecipeName
    """Its name on the command line."""

    text: str
    """What it is, for people."""

    facts: RunFacts
    """What a run of this recipe configures, for the rules."""

    settings: Mapping[DeviceKind, tuple[Setting, ...]]
    """What it needs beyond the device's own settings."""


RECIPES: Mapping[RecipeName, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            name="rollout",
            text="sampling only, no new weights",
            facts=RunFacts(sleep_mode=False, online_weight_update=False),
            settings={},
        ),
        Recipe(
            name="colocated-rl",
            text="trainer and sampler take turns on the same devices",
            facts=RunFacts(sleep_mode=True, online_weight_update=True),
            settings={"npu": (_NO_NZ, *_SHARED_NPU)},
        ),
        Recipe(
            name="disaggregated-rl",
            text="trainer and sampler have devices of their own",
            facts=RunFacts(sleep_mode=False, online_weight_update=True),
            settings={"npu": (_NO_NZ,)},
        ),
        Recipe(
            name="reproducible-rl",
            text="as colocated-rl, with the same numbers in every run",
            facts=RunFacts(sleep_mode=True, online_weight_update=True),
            settings={
                **_REPRODUCIBLE,
                "npu": (_NO_NZ, *_SHARED_NPU, *_REPRODUCIBLE["npu"]),
            },
        ),
    )
}
"""Every recipe by name."""


def profile_for(
    kind: DeviceKind,
    recipe: RecipeName,
    *,
    num_threads: int,
    user: Mapping[str, str] | None = None,
) -> Profile:
    """What each worker process needs: the device's settings, the recipe's, then the user's.

    Args:
        kind: where the workers compute.
        recipe: what the run does with its devices.
        num_threads: OpenMP threads per worker process.
        user: values that take the place of any other; what they contradict is for a `Judge`.
    """
    if recipe not in RECIPES:
        raise ValueError(f"unknown recipe {recipe!r}; known: {', '.join(RECIPE_NAMES)}")
    chosen = RECIPES[recipe]
    own = tuple(
        Setting(name=name, value=value, reason="set by the user", source="the user")
        for name, value in (user or {}).items()
    )
    return layered(
        f"{kind}, {recipe}: {chosen.text}",
        thread_profile(kind, num_threads=num_threads),
        Profile(name=kind, settings=_DEVICE_SETTINGS[kind]),
        Profile(name=recipe, settings=chosen.settings.get(kind, ())),
        Profile(name="user", settings=own),
    )
