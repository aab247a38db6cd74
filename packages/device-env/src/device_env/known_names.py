"""Every variable that looked-at versions of vllm and vllm-ascend read.

The names are those of the tables in `vllm/envs.py` and `vllm_ascend/envs.py` of the published
wheels, extracted by tools/check_env_registry.py of this repository.
"""

import functools
import json
from importlib import resources
from typing import Literal

from packaging.version import Version

NamesOf = Literal["vllm", "vllm-ascend"]
"""Distributions that keep a table of the variables they read."""


def known_names(distribution: NamesOf, version: str) -> frozenset[str] | None:
    """Names that this version reads; None when it is not among the versions looked at.

    A local part such as `+cpu` does not count: the wheels of one version read the same names.
    """
    return _tables(distribution).get(Version(version).public)


def known_versions(distribution: NamesOf) -> tuple[str, ...]:
    """Versions looked at, oldest first."""
    return tuple(_tables(distribution))


@functools.cache
def _tables(distribution: NamesOf) -> dict[str, frozenset[str]]:
    """Names by version; in the file each name has one character per version, 1 where read."""
    file = resources.files("device_env").joinpath("data", "names", f"{distribution}.json")
    table = json.loads(file.read_text(encoding="utf-8"))
    return {
        version: frozenset(name for name, read in table["names"].items() if read[index] == "1")
        for index, version in enumerate(table["versions"])
    }
