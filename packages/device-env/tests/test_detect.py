"""Detection in fresh processes, with stand-ins for the vendors' modules on sys.path."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from device_env import Device, detect_device

CPU_TORCH = """
from types import SimpleNamespace
__version__ = "2.13.0+cpu"
version = SimpleNamespace(cuda=None, hip=None)
"""

GPU_TORCH = """
from types import SimpleNamespace
__version__ = "2.13.0"
version = SimpleNamespace(cuda={cuda!r}, hip={hip!r})
cuda = SimpleNamespace(
    is_available=lambda: {count} > 0,
    device_count=lambda: {count},
    get_device_properties=lambda i: SimpleNamespace(name="GPU " + str(i), total_memory=1000 + i),
)
"""

NPU = """
from types import SimpleNamespace
npu = SimpleNamespace(
    device_count=lambda: {count},
    get_device_name=lambda i: "Ascend910B",
    get_device_properties=lambda i: SimpleNamespace(total_memory=64),
)
"""

PROGRAM = """
import json, sys, attrs
from device_env import DeviceEnvError, detect_device
force = sys.argv[1] or None
try:
    print(json.dumps(attrs.asdict(detect_device(force=force))))
except (DeviceEnvError, ValueError) as error:
    print(json.dumps({"error": str(error), "type": type(error).__name__}))
"""


def first(folder: Path) -> str:
    """A PYTHONPATH that begins with a folder."""
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))


def detect(
    folder: Path,
    modules: Mapping[str, str],
    environ: Mapping[str, str] | None = None,
    force: str = "",
) -> dict[str, object]:
    """What `detect_device` says in a new process that finds these modules first."""
    for name, source in modules.items():
        (folder / f"{name}.py").write_text(source)
    hidden = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    clean = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, force],
        env={**clean, "PYTHONPATH": first(folder), **(environ or {})},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    answer: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return answer


def reason(answer: Mapping[str, object], kind: str) -> str:
    """The reason given against one kind."""
    rejected = answer["rejected"]
    assert isinstance(rejected, list)
    (found,) = [str(entry["reason"]) for entry in rejected if entry["kind"] == kind]
    return found


def test_import_loads_no_vendor() -> None:
    """Importing the package loads neither torch nor any other vendor."""
    program = (
        "import sys, device_env;"
        "print([m for m in ('torch', 'torch_npu', 'vllm', 'ray', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def test_npu_package_without_devices_is_a_cpu(tmp_path: Path) -> None:
    """A torch_npu that imports but counts zero devices is no device (case A39)."""
    answer = detect(tmp_path, {"torch": CPU_TORCH, "torch_npu": NPU.format(count=0)})
    assert answer["kind"] == "cpu"
    assert "torch_npu imports but sees no device" in reason(answer, "npu")


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        ("OSError('libhccl.so: cannot open shared object file')", "libhccl.so: cannot open"),
        ("ImportError('libascendcl.so: no such file')", "libascendcl.so: no such file"),
        ("RuntimeError('CANN is not initialised')", "CANN is not initialised"),
        ('AttributeError("torch._C has no attribute x")', "torch._C has no attribute x"),
    ],
)
def test_npu_package_that_fails_to_import_is_a_cpu_with_the_reason(
    tmp_path: Path, raised: str, said: str
) -> None:
    """A torch_npu whose import fails leaves a CPU and keeps the reason (case A39)."""
    answer = detect(tmp_path, {"torch": CPU_TORCH, "torch_npu": f"raise {raised}"})
    assert answer["kind"] == "cpu"
    assert said in reason(answer, "npu")
    assert "source CANN's set_env.sh" in reason(answer, "npu")


def test_npu_that_cannot_be_opened_is_a_cpu(tmp_path: Path) -> None:
    """A RuntimeError of the driver while counting is a reason, not a crash (case A39)."""
    stub = (
        "from types import SimpleNamespace\n"
        "def _count():\n    raise RuntimeError('drvGetDevNum failed')\n"
        "npu = SimpleNamespace(device_count=_count)\n"
    )
    answer = detect(tmp_path, {"torch": CPU_TORCH, "torch_npu": stub})
    assert answer["kind"] == "cpu"
    assert "drvGetDevNum failed" in reason(answer, "npu")


def test_npu_package_without_its_parts_is_a_cpu(tmp_path: Path) -> None:
    """A module of the name torch_npu that is not the vendor's is a reason, not a crash."""
    answer = detect(tmp_path, {"torch": CPU_TORCH, "torch_npu": ""})
    assert answer["kind"] == "cpu"
    assert "has no attribute 'npu'" in reason(answer, "npu")


def test_cuda_that_cannot_count_is_a_cpu(tmp_path: Path) -> None:
    """An error of the driver while counting is a reason, not a crash."""
    torch = GPU_TORCH.format(cuda="13.0", hip=None, count=2) + (
        "def _fail():\n    raise RuntimeError('driver/library version mismatch')\n"
        "cuda.device_count = _fail\n"
    )
    answer = detect(tmp_path, {"torch": torch})
    assert answer["kind"] == "cpu"
    assert "cannot count devices: driver/library version mismatch" in reason(answer, "cuda")


def test_forced_npu_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    """Demanding an NPU where torch_npu counts none is an error, not a CPU (case A39)."""
    modules = {"torch": CPU_TORCH, "torch_npu": NPU.format(count=0)}
    answer = detect(tmp_path, modules, force="npu")
    assert answer["type"] == "DeviceNotFoundError"
    assert "device kind 'npu' was demanded, but is not there: torch_npu imports" in str(
        answer["error"]
    )


def test_npu_that_is_there(tmp_path: Path) -> None:
    """Counted NPUs are the device, with HCCL and the Ascend variable."""
    answer = detect(tmp_path, {"torch": CPU_TORCH, "torch_npu": NPU.format(count=2)})
    assert (answer["kind"], answer["count"], answer["collective_backend"]) == ("npu", 2, "hccl")
    assert answer["names"] == ["Ascend910B", "Ascend910B"]
    assert answer["memory_bytes"] == [64, 64]
    assert answer["visible_devices_variable"] == "ASCEND_RT_VISIBLE_DEVICES"
    assert answer["torch_device_type"] == "npu"
    assert reason(answer, "cuda") == "torch 2.13.0+cpu is built without CUDA"


def test_cuda_that_is_there(tmp_path: Path) -> None:
    """Counted NVIDIA GPUs are the device, and nothing else is looked for."""
    answer = detect(tmp_path, {"torch": GPU_TORCH.format(cuda="13.0", hip=None, count=2)})
    assert (answer["kind"], answer["count"], answer["collective_backend"]) == ("cuda", 2, "nccl")
    assert answer["memory_bytes"] == [1000, 1001]
    assert answer["rejected"] == []


@pytest.mark.parametrize("value", ["", "-1"])
def test_cuda_hidden_by_its_variable_is_a_cpu(tmp_path: Path, value: str) -> None:
    """An empty or -1 CUDA_VISIBLE_DEVICES hides every GPU, and the reason says so."""
    torch = GPU_TORCH.format(cuda="13.0", hip=None, count=2)
    answer = detect(tmp_path, {"torch": torch}, {"CUDA_VISIBLE_DEVICES": value})
    assert answer["kind"] == "cpu"
    assert reason(answer, "cuda") == f"CUDA_VISIBLE_DEVICES={value!r} hides every GPU"


def test_cuda_build_without_device_names_the_variable(tmp_path: Path) -> None:
    """A CUDA build that counts nothing says which ids were asked for."""
    torch = GPU_TORCH.format(cuda="13.0", hip=None, count=0)
    answer = detect(tmp_path, {"torch": torch}, {"CUDA_VISIBLE_DEVICES": "GPU-8932f937"})
    assert "sees no device, CUDA_VISIBLE_DEVICES=GPU-8932f937" in reason(answer, "cuda")


def test_rocm_is_cuda_to_torch_and_nccl_to_collectives(tmp_path: Path) -> None:
    """A ROCm build gives kind rocm, torch's type cuda and the backend name nccl."""
    answer = detect(tmp_path, {"torch": GPU_TORCH.format(cuda=None, hip="7.1", count=1)})
    assert (answer["kind"], answer["torch_device_type"]) == ("rocm", "cuda")
    assert answer["collective_backend"] == "nccl"
    assert answer["visible_devices_variable"] == "HIP_VISIBLE_DEVICES"


def test_rocm_with_contradicting_variables_is_an_error(tmp_path: Path) -> None:
    """HIP and CUDA variables that differ stop detection on ROCm (case A40)."""
    torch = GPU_TORCH.format(cuda=None, hip="7.1", count=1)
    answer = detect(
        tmp_path, {"torch": torch}, {"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}
    )
    assert answer["type"] == "VisibleDevicesError"
    assert "choose different GPUs" in str(answer["error"])


def install_extension(folder: Path, source: str) -> None:
    """Install a torch_npu that torch loads when it is imported."""
    info = folder / "torch_npu-2.10.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.10.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    (folder / "torch_npu.py").write_text(source)


def test_broken_backend_extension_does_not_break_detection(tmp_path: Path) -> None:
    """With the real torch, an installed torch_npu without CANN is no reason against a GPU.

    `import torch` fails there, and a second attempt crashes the interpreter (case A39).
    """
    install_extension(tmp_path, "raise ImportError('libhccl.so: cannot open')")
    answer = detect(tmp_path, {}, {"CUDA_VISIBLE_DEVICES": ""})
    assert answer["kind"] == "cpu"
    assert "torch_npu" not in reason(answer, "cuda")
    assert "libhccl.so: cannot open" in reason(answer, "npu")


def test_doctor_says_that_a_broken_extension_breaks_torch(tmp_path: Path) -> None:
    """What detection gets around stops every other program, so the doctor calls it an error."""
    install_extension(tmp_path, "raise ImportError('libhccl.so: cannot open')")

    def doctor(**environ: str) -> dict[str, str]:
        done = subprocess.run(
            [sys.executable, "-m", "device_env", "doctor", "--json"],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": first(tmp_path), **environ},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        report = json.loads(done.stdout)
        return {found["variable"]: found["message"] for found in report["findings"]}

    assert doctor()["torch"] == (
        "import torch fails here: it loads the extension torch_npu, and libhccl.so: cannot open"
    )
    assert "torch" not in doctor(TORCH_DEVICE_BACKEND_AUTOLOAD="0")


def test_without_torch_there_is_still_a_cpu(tmp_path: Path) -> None:
    """A missing torch is a reason against GPUs, not an error."""
    missing = "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')"
    answer = detect(tmp_path, {"torch": missing})
    assert answer["kind"] == "cpu"
    assert reason(answer, "cuda") == "torch is not installed"


def test_cpu_is_one_device_with_gloo() -> None:
    """The CPU can always be demanded; it is one device whose collectives run over gloo."""
    device = detect_device({}, force="cpu")
    assert (device.kind, device.count, device.collective_backend) == ("cpu", 1, "gloo")
    assert device.visible_devices_variable is None
    assert device.memory_bytes[0] > 1 << 28


def test_unknown_kind_is_refused() -> None:
    """A kind that does not exist is refused with the list of those that do."""
    with pytest.raises(ValueError, match=r"unknown device kind 'gpu'; known: cuda, rocm, npu, cpu"):
        detect_device({}, force="gpu")  # type: ignore[arg-type]


def test_device_with_disagreeing_parts_is_refused() -> None:
    """A device needs one name and one size for each of its count."""
    with pytest.raises(ValueError, match=r"got 2 devices, 1 names and 1 sizes"):
        Device(
            kind="cuda",
            count=2,
            names=("a",),
            memory_bytes=(1,),
            collective_backend="nccl",
            visible_devices_variable=None,
            torch_device_type="cuda",
        )


@pytest.mark.gpu
@pytest.mark.skipif(
    not Path("/dev/nvidiactl").exists() and not Path("/dev/kfd").exists(),
    reason="no NVIDIA or AMD driver on this host",
)
def test_real_gpu_is_found() -> None:
    """On a machine with a GPU, detection names it with its memory."""
    device = detect_device()
    assert device.kind in {"cuda", "rocm"}
    assert min(device.memory_bytes) > 1 << 30
