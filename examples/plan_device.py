"""What a plan needs to know of a device, each figure with its source.

Peaks, memory and links are what vendors publish. Of an H200 this repository has measured what is
reached of them; of the others nothing, and the same shares are taken.
"""

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal, final

import attrs

GIB: Final = 2**30

DeviceKind = Literal["cuda", "rocm", "npu", "cpu"]
"""Names as in device-env."""

MEASURED_PRODUCT: Final = 668.6e12
"""Operations per second of a product of two 8192 x 8192 bfloat16 matrices of random numbers on an
H200 (benchmarks/results/fsdp_train.json; 677 and 631 in the other two files)."""

_PRODUCT_SHARE: Final = MEASURED_PRODUCT / 989.4e12
_GATHER_SHARE: Final = 208.0 / 450.0
_HOST_SHARE: Final = 45.9 / 64.0


@final
@attrs.frozen(kw_only=True)
class DeviceFacts:
    """One device, and how it is connected. Rates are per second, in one direction."""

    name: str
    kind: DeviceKind

    memory_bytes: int
    """That programs see."""

    peak_flops: float
    """bfloat16 matrix products, without sparsity, as published."""

    product_flops: float
    """What a large product reaches."""

    memory_bytes_per_s: float
    """As published."""

    gather_bytes_per_s: float
    """That a device receives in an all-gather, within a node."""

    network_bytes_per_s: float
    """Between nodes, for each device."""

    host_bytes_per_s: float
    """Between the device and pinned memory of its host."""

    devices_per_node: int
    """Devices that are connected at `gather_bytes_per_s`."""

    is_measured: bool
    """Whether this repository has run on one."""

    source: str
    """Of the published figures."""


def _derived(  # a row of a table
    name: str,
    kind: DeviceKind,
    *,
    memory_gib: float,
    peak: float,
    bandwidth: float,
    link: float,
    network: float,
    pcie: float,
    node: int,
    source: str,
) -> DeviceFacts:
    """A device of which what is reached is taken from the H200's shares."""
    return DeviceFacts(
        name=name,
        kind=kind,
        memory_bytes=int(memory_gib * GIB),
        peak_flops=peak,
        product_flops=peak * _PRODUCT_SHARE,
        memory_bytes_per_s=bandwidth,
        gather_bytes_per_s=link * _GATHER_SHARE,
        network_bytes_per_s=network,
        host_bytes_per_s=pcie * _HOST_SHARE,
        devices_per_node=node,
        is_measured=False,
        source=source,
    )


_H200 = DeviceFacts(
    name="h200",
    kind="cuda",
    # 141 GB are published, of which programs see this much
    memory_bytes=139 * GIB,
    peak_flops=989.4e12,
    product_flops=MEASURED_PRODUCT,
    memory_bytes_per_s=4.8e12,
    # NCCL between two of them (benchmarks/results/veomni_step.json); 450e9 are published
    gather_bytes_per_s=208.0e9,
    network_bytes_per_s=50.0e9,
    # 20.6 GB in 0.449 s (benchmarks/results/fsdp_memory.json); 64e9 are published
    host_bytes_per_s=45.9e9,
    devices_per_node=8,
    is_measured=True,
    source="nvidia.com/en-us/data-center/h200; one 400 Gb/s network card each, as in a DGX H200",
)

_CLOUDMATRIX = "arXiv:2506.12708, section 3 (a 910C is two dies, each of which is a device)"

DEVICES: Final[Mapping[str, DeviceFacts]] = MappingProxyType(
    {
        facts.name: facts
        for facts in (
            _H200,
            _derived(
                "h100-80g",
                "cuda",
                memory_gib=79.1,
                peak=989.4e12,
                bandwidth=3.35e12,
                link=450e9,
                network=50e9,
                pcie=64e9,
                node=8,
                source="nvidia.com/en-us/data-center/h100, SXM",
            ),
            _derived(
                "a100-80g",
                "cuda",
                memory_gib=79.1,
                peak=312e12,
                bandwidth=2.039e12,
                link=300e9,
                network=25e9,
                pcie=32e9,
                node=8,
                source="nvidia.com/en-us/data-center/a100, SXM",
            ),
            _derived(
                "mi300x",
                "rocm",
                memory_gib=191.0,
                peak=1307.4e12,
                bandwidth=5.3e12,
                link=448e9,
                network=50e9,
                pcie=64e9,
                node=8,
                source="amd.com, data sheet of the Instinct MI300X (seven links of 64 GB/s)",
            ),
            _derived(
                "ascend-910b",
                "npu",
                memory_gib=61.0,
                peak=376e12,
                bandwidth=1.6e12,
                link=196e9,
                network=25e9,
                pcie=32e9,
                node=8,
                source=f"no public data sheet: as a die of a 910C, {_CLOUDMATRIX}",
            ),
            _derived(
                "ascend-910c",
                "npu",
                memory_gib=61.0,
                peak=376e12,
                bandwidth=1.6e12,
                link=196e9,
                network=50e9,
                pcie=32e9,
                node=16,
                source=f"{_CLOUDMATRIX}; Atlas 800T A3: eight packages in a node",
            ),
        )
    }
)
"""Accelerators by name. `cpu` is made by `this_cpu`."""


def this_cpu() -> DeviceFacts:
    """The host: its own memory and cores, at the rate of a core that was measured.

    A core reached 0.28 TFLOP/s in a training step in bfloat16 (benchmarks/results/fsdp_step.json)
    on a machine with bfloat16 instructions; others may be ten times slower.
    """
    cores = os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return DeviceFacts(
        name="cpu",
        kind="cpu",
        memory_bytes=memory,
        peak_flops=cores * 0.28e12,
        product_flops=cores * 0.28e12,
        memory_bytes_per_s=cores * 5e9,
        gather_bytes_per_s=2e9,
        network_bytes_per_s=1e9,
        host_bytes_per_s=5e9,
        devices_per_node=1,
        is_measured=True,
        source="benchmarks/results/fsdp_step.json for the cores; the rest is assumed",
    )


def find_device(name: str) -> DeviceFacts:
    """A device by name.

    Raises:
        ValueError: for another name, with those that are known.
    """
    if name == "cpu":
        return this_cpu()
    if name not in DEVICES:
        message = f"device {name!r}: expected one of {', '.join([*DEVICES, 'cpu'])}"
        raise ValueError(message)
    return DEVICES[name]
