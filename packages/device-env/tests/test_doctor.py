"""The doctor, the checks behind it and the command line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from device_env.cli import main
from device_env.doctor import Report
from device_env.findings import Finding
from device_env.host import Host, inspect_host
from device_env.packages import providers_of, unmet_torch_pin
from device_env.render import Style, render_report

HOST = Host(
    cores=2, core_quota=1.5, shared_memory_bytes=64 << 20, shared_memory_free_bytes=32 << 20
)


def doctor(
    folder: Path, environ: dict[str, str], *options: str
) -> subprocess.CompletedProcess[str]:
    """Run the command in a new process whose modules and distributions start with a folder."""
    return subprocess.run(
        [sys.executable, "-m", "device_env", "doctor", *options],
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(folder),
            "OMP_NUM_THREADS": "1",
            **environ,
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def install(folder: Path, name: str, version: str, module: str) -> None:
    """Put the metadata of a distribution with one module into a folder."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "top_level.txt").write_text(f"{module}\n")


def test_doctor_reports_this_machine(tmp_path: Path) -> None:
    """Here the one vllm provider is fine, and a stale variable is a warning with a way out."""
    done = doctor(tmp_path, {"VLLM_USE_V1": "1", "CUDA_VISIBLE_DEVICES": ""}, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["device"]["kind"] == "cpu"
    assert report["vllm_providers"] == list(providers_of("vllm"))
    assert report["healthy"] is True
    levels = {found["variable"]: found["level"] for found in report["findings"]}
    assert levels["VLLM_USE_V1"] == "warning"


def test_two_providers_of_vllm_are_an_error(tmp_path: Path) -> None:
    """A second distribution that installs the vllm module is named, and what to do about it."""
    install(tmp_path, "vllm-other", "0.32.0", "vllm")
    (installed,) = providers_of("vllm")
    done = doctor(tmp_path, {})
    shown = " ".join(done.stdout.split())
    assert done.returncode == 1
    assert f"2 distributions install the module vllm, over each other: {installed}, vllm-other" in (
        shown
    )
    assert f"uninstall all of them ({installed} vllm-other) and install one" in shown


def test_broken_torch_is_an_error(tmp_path: Path) -> None:
    """A torch that cannot be imported makes the machine not ready."""
    (tmp_path / "torch.py").write_text("raise OSError('libc10.so: cannot open')")
    done = doctor(tmp_path, {})
    assert done.returncode == 1
    assert "torch cannot be imported: libc10.so: cannot open" in " ".join(done.stdout.split())


def test_unreadable_thread_number_is_an_error(tmp_path: Path) -> None:
    """OMP_NUM_THREADS that is no number is an error."""
    done = doctor(tmp_path, {"OMP_NUM_THREADS": "all"})
    assert done.returncode == 1
    assert "integers of at least 1, with commas between them, or one, got 'all'" in " ".join(
        done.stdout.split()
    )


def test_torch_pin_of_a_companion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A companion package made for another torch is found through its requirement."""
    install(tmp_path, "companion", "1.0", "companion")
    (metadata,) = tmp_path.glob("companion*/METADATA")
    with metadata.open("a") as file:
        file.write("Requires-Dist: torch==2.12.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert unmet_torch_pin("companion", "2.13.0") == "torch==2.12.0"
    assert unmet_torch_pin("companion", "2.12.0+cpu") is None


def test_control_group_quota(tmp_path: Path) -> None:
    """150000 microseconds in 100000 are one core and a half; max is no limit."""
    limited, free = tmp_path / "limited", tmp_path / "free"
    limited.write_text("150000 100000\n")
    free.write_text("max 100000\n")
    assert inspect_host(cpu_max=limited).core_quota == 1.5
    assert inspect_host(cpu_max=free).core_quota is None
    assert inspect_host(shared_memory=tmp_path / "none").shared_memory_bytes is None


def test_report_text() -> None:
    """The report is aligned, wrapped, and says what to do next."""
    report = Report(
        device=None,
        python="3.11.7",
        versions={"torch": "2.13.0"},
        vllm_providers=(),
        host=HOST,
        environment={},
        findings=(
            Finding(level="error", variable="X", message="expected a, got b", fix="write a"),
        ),
    )
    text = render_report(report, Style(width=60))
    assert "  cores           2, 1.5 granted by the control group" in text
    assert "  /dev/shm        0.1 GiB, 0.0 GiB free" in text
    assert "  error    X\n           expected a, got b\n           -> write a" in text
    assert text.endswith("1 error: this machine is not ready. Follow the arrows,\nerrors first.")
    assert max(len(line) for line in text.splitlines()) <= 60
    assert "\x1b" not in text
    assert "\x1b[31;1merror" in render_report(report, Style(colour=True))


def test_check_names_file_and_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A stale variable of a file is shown with its line; it fails only under --strict."""
    file = tmp_path / "run.env"
    file.write_text("OMP_NUM_THREADS=1\nexport VLLM_USE_V1=1\n")
    command = ["check", "--env-file", str(file), "--vllm", "0.32.0"]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert f"warning  {file}:2: VLLM_USE_V1" in shown
    assert "2 variables: 1 warning" in shown
    assert main([*command, "--strict"]) == 1


def test_check_json_and_error_exit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An error makes the exit code 1, and JSON carries the line."""
    file = tmp_path / "run.env"
    file.write_text("VLLM_WORKER_MULTIPROC_METHOD=thread\n")
    assert main(["check", "--env-file", str(file), "--vllm", "0.32.0", "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["level"], found["line"]) == ("error", 1)


def test_check_of_a_bad_file_and_a_bad_version(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wrong calls exit with 2 and say what was expected."""
    file = tmp_path / "run.sh"
    file.write_text("python train.py\n")
    assert main(["check", "--env-file", str(file)]) == 2
    assert "line 1: expected NAME=value, got 'python'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["check", "--vllm", "latest"])
    assert "expected a version such as 0.32.0, got 'latest'" in capsys.readouterr().err


def test_check_needs_no_torch(tmp_path: Path) -> None:
    """Judging an environment imports no vendor."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    done = subprocess.run(
        [sys.executable, "-m", "device_env", "check", "--vllm", "0.32.0"],
        env={"PYTHONPATH": str(tmp_path), "VLLM_USE_V1": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert "VLLM_USE_V1" in done.stdout


def test_explain_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Known names are explained, a misspelt one is answered with the right one and exit 2."""
    assert main(["explain", "HCCL_EXEC_TIMEOUT"]) == 0
    assert "clamps HCCL_EXEC_TIMEOUT to 1091 s" in " ".join(capsys.readouterr().out.split())
    assert main(["explain", "HCCL_EXEC_TIMOUT", "HCCL_BUFFSIZE"]) == 2
    printed = capsys.readouterr()
    assert "did you mean HCCL_EXEC_TIMEOUT" in printed.err
    assert "HCCL_BUFFSIZE\n  owner" in printed.out
