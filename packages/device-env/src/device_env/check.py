"""Does every variable in this environment take effect as it is written?"""

import difflib
from collections.abc import Collection, Mapping
from typing import final

import attrs
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from device_env.device import DeviceKind
from device_env.domains import check_value
from device_env.findings import Finding, gravest_first
from device_env.known_names import known_names
from device_env.registry import Registry, Variable
from device_env.rules import RULES, RunFacts, Situation

_DISTRIBUTIONS = frozenset({"vllm", "vllm-ascend", "torch-npu", "torch", "ray", "verl"})
"""Readers whose version can be asked for; those beyond (CANN, NCCL, ...) are not judged."""

_FAMILIES = (
    "ASCEND_", "CUDA_", "HCCL_", "HIP_", "NCCL_", "OMP_", "PYTORCH_", "RAY_", "ROCR_", "TORCH_",
)  # fmt: skip
_MISSPELT = 0.93
"""Below it are pairs of real names such as NCCL_IB_DISABLE and NCCL_IBEXT_DISABLE (0.91)."""


def check_environment(
    environ: Mapping[str, str],
    versions: Mapping[str, str],
    *,
    device_kind: DeviceKind | None = None,
    facts: RunFacts | None = None,
    not_installed: Collection[str] = (),
    vllm_names: Collection[str] | None = None,
    registry: Registry | None = None,
) -> list[Finding]:
    """Find variables that nobody reads, values that nobody takes, and contradictions.

    Args:
        environ: the environment under check; it need not be that of this process.
        versions: versions by distribution name: `vllm` (whichever distribution provides it),
            `vllm-ascend`, `torch-npu`, `torch`, `ray`. What is absent is not judged.
        device_kind: the device of the run, for rules that depend on it.
        facts: what the run's configuration says, for rules that depend on it.
        not_installed: distributions known to be absent; their variables have no reader.
        vllm_names: every name that the vllm of the run reads, see `names_read_by_vllm`; by
            default those of its version, where they are known (`known_names`).
        registry: the facts, by default those that ship with this package.

    Returns:
        Findings, gravest first; empty when nothing is known against the environment.
    """
    judge = Judge(
        versions=versions,
        device_kind=device_kind,
        facts=RunFacts() if facts is None else facts,
        not_installed=frozenset(not_installed),
        vllm_names=None if vllm_names is None else frozenset(vllm_names),
        registry=Registry.load() if registry is None else registry,
    )
    return judge.environment(environ)


@final
@attrs.frozen(kw_only=True)
class Judge:
    """What is known about a run, applied to variables one by one and together."""

    versions: Mapping[str, str]
    """Versions by distribution name."""

    device_kind: DeviceKind | None = None
    """The device, where it is known."""

    facts: RunFacts = attrs.field(factory=RunFacts)
    """The configuration, where it is known."""

    not_installed: frozenset[str] = frozenset()
    """Distributions known to be absent."""

    vllm_names: frozenset[str] | None = None
    """Every name that the run's vllm reads; None for those of its version (`known_names`)."""

    registry: Registry = attrs.field(factory=Registry.load)
    """The facts."""

    def __attrs_post_init__(self) -> None:
        """Refuse versions that would be passed over: misspelt names, and what is no version."""
        for name, version in self.versions.items():
            if canonicalize_name(name) != name:
                message = f"expected the name {canonicalize_name(name)!r}, got {name!r}"
                raise ValueError(f"versions: {message}")
            try:
                Version(version)
            except InvalidVersion as error:
                message = f"expected a version such as 0.32.0, got {version!r}"
                raise ValueError(f"versions: {name}: {message}") from error

    def environment(self, environ: Mapping[str, str]) -> list[Finding]:
        """All that there is against an environment, gravest first."""
        findings = [found for name in environ for found in self.variable(name, environ[name])]
        return gravest_first([*findings, *self.together(environ)])

    def variable(self, name: str, value: str | None) -> list[Finding]:
        """What there is against one variable; a value of None is not known and not judged."""
        if name not in self.registry:
            return self._beyond_the_registry(name)
        variable = self.registry.lookup(name)
        stale = _stale(variable, self.versions, self.not_installed, self._names())
        findings = [] if stale is None else [stale]
        if stale is None or stale.level == "note":
            findings += _value_and_age(variable, value, self.versions)
        return findings

    def together(self, environ: Mapping[str, str]) -> list[Finding]:
        """What variables do to each other, to the configuration and on the device."""
        situation = Situation(
            environ=environ,
            versions=self.versions,
            device_kind=self.device_kind,
            facts=self.facts,
        )
        return [found for rule in RULES if (found := rule.check(situation)) is not None]

    def _beyond_the_registry(self, name: str) -> list[Finding]:
        """What there is against a name of which the registry says nothing."""
        if name.upper() != name and name.upper() in self.registry:
            return [
                Finding(
                    level="warning",
                    variable=name,
                    message=f"is not {name.upper()}: names are told apart by their case",
                    fix=f"write {name.upper()}",
                )
            ]
        if name.startswith("VLLM_ASCEND_") and "vllm-ascend" in self.versions:
            names = known_names("vllm-ascend", self.versions["vllm-ascend"])
            return [_unknown_to(name, "vllm-ascend", self.versions, names)]
        if name.startswith("VLLM_"):
            names = None if name.startswith("VLLM_ASCEND_") else self._names()
            return [_unknown_to(name, "vllm", self.versions, names)]
        near = difflib.get_close_matches(
            name, [variable.name for variable in self.registry], n=1, cutoff=_MISSPELT
        )
        if not near or not name.startswith(_FAMILIES):
            return []
        return [
            Finding(
                level="note",
                variable=name,
                message="not judged: the registry does not know it",
                fix=f"did you mean {near[0]}?",
            )
        ]

    def _names(self) -> frozenset[str] | None:
        if self.vllm_names is not None or "vllm" not in self.versions:
            return self.vllm_names
        return known_names("vllm", self.versions["vllm"])


def _stale(
    variable: Variable,
    versions: Mapping[str, str],
    not_installed: Collection[str],
    vllm_names: Collection[str] | None,
) -> Finding | None:
    reader = variable.reader
    instead = variable.replacement or "nothing known replaces it; remove the variable"
    fix = f"instead: {instead}" if variable.replacement else instead
    if variable.never_read:
        who = "anything" if reader is None else reader
        message = f"no version of {who} reads it"
        return Finding(level="warning", variable=variable.name, message=message, fix=fix)
    if reader is None or reader not in _DISTRIBUTIONS:
        return None
    if reader in not_installed:
        message = f"nobody reads it here: {reader} is not installed"
        return Finding(
            level="warning", variable=variable.name, message=message, fix="remove the variable"
        )
    if reader not in versions:
        message = f"not judged: read by {reader}, whose version was not given"
        return Finding(
            level="note",
            variable=variable.name,
            message=message,
            fix=f"give {reader}'s version (--{reader})",
        )
    return _stale_in(variable, reader, Version(versions[reader]), vllm_names, fix)


def _stale_in(
    variable: Variable,
    reader: str,
    version: Version,
    vllm_names: Collection[str] | None,
    fix: str,
) -> Finding | None:
    reading = variable.reading(version)
    if reader == "vllm" and reading == "unknown" and vllm_names is not None:
        reading = "read" if variable.name in vllm_names else "not read"
    if reading == "unknown" and variable.last_read is not None:
        message = f"not judged: {reader} {version} is not among the versions looked at"
        return Finding(
            level="note",
            variable=variable.name,
            message=f"{message} ({_history(variable)})",
            fix=f"look for it in the documentation of {reader} {version}",
        )
    if reading != "not read":
        return None
    message = f"{reader} {version} does not read it ({_history(variable)})"
    return Finding(level="warning", variable=variable.name, message=message, fix=fix)


def _history(variable: Variable) -> str:
    if variable.last_read is not None and variable.removed_in is not None:
        gone = variable.removed_in
        when = "after it" if gone.version == variable.last_read else f"in {gone.version}"
        return f"last read by {variable.last_read}, gone {when}"
    if variable.first_read is not None and variable.last_read is not None:
        return f"known to be read from {variable.first_read} to {variable.last_read}"
    if variable.first_read is not None:
        return f"first read by {variable.first_read}"
    return "in none of the versions looked at"


def _value_and_age(
    variable: Variable, value: str | None, versions: Mapping[str, str]
) -> list[Finding]:
    findings: list[Finding] = []
    violation = (
        None if value is None or variable.domain is None else check_value(variable.domain, value)
    )
    if violation is not None:
        findings.append(
            Finding(
                level=violation.level,
                variable=variable.name,
                message=violation.message,
                fix=violation.fix,
            )
        )
    since = variable.deprecated_in
    version = versions.get(variable.reader or "")
    if since is not None and version is not None and Version(version) >= since:
        findings.append(
            Finding(
                level="warning",
                variable=variable.name,
                message=f"deprecated in {variable.reader} {since}",
                fix=f"use {variable.replacement}",
            )
        )
    return findings


def _unknown_to(
    name: str, reader: str, versions: Mapping[str, str], names: Collection[str] | None
) -> Finding:
    if names is None:
        return Finding(
            level="note",
            variable=name,
            message="not judged: the registry does not know it",
            fix="check the name against the documentation of the version you run",
        )
    version = versions.get(reader, "of unknown version")
    if name in names:
        return Finding(
            level="note",
            variable=name,
            message=f"{reader} {version} reads it; its value is not judged: the registry does not "
            "know it",
            fix="check the value against the documentation of the version you run",
        )
    near = difflib.get_close_matches(name, names, n=2, cutoff=0.8)
    return Finding(
        level="warning",
        variable=name,
        message=f"{reader} {version} does not read it",
        fix=f"did you mean {' or '.join(near)}?" if near else "remove the variable",
    )
