"""Profiles for worker processes."""

import subprocess

import attrs
import pytest

from device_env import (
    RECIPE_NAMES,
    RECIPES,
    Device,
    DeviceKind,
    Judge,
    Profile,
    ProfileConflictError,
    RecipeName,
    Setting,
    apply,
    detect_device,
    layered,
    profile_for,
    shell_lines,
    worker_environment,
    worker_profile,
)
from device_env.cli import main
from device_env.device import DEVICE_KINDS
from device_env.shell_script import follow_script

CPU = detect_device({}, force="cpu")
GPU = Device(
    kind="cuda",
    count=1,
    names=("H200",),
    memory_bytes=(1,),
    collective_backend="nccl",
    visible_devices_variable="CUDA_VISIBLE_DEVICES",
    torch_device_type="cuda",
)


def test_cpu_workers_do_not_spin() -> None:
    """A CPU worker gets its threads, sleeps while it waits, and is not pinned by vLLM."""
    assert worker_environment(CPU, num_threads=2) == {
        "OMP_NUM_THREADS": "2",
        "OMP_WAIT_POLICY": "passive",
        "GOMP_SPINCOUNT": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }


def test_gpu_workers_get_threads_only() -> None:
    """The measurements behind the other settings were made on a CPU."""
    assert worker_environment(GPU, num_threads=4) == {"OMP_NUM_THREADS": "4"}


def test_apply_sets_what_is_unset_and_returns_it() -> None:
    """What agrees already is kept and is no change."""
    environ = {"GOMP_SPINCOUNT": "0"}
    changes = apply(worker_profile(CPU, num_threads=1), environ)
    assert [change.name for change in changes] == [
        "OMP_NUM_THREADS",
        "OMP_WAIT_POLICY",
        "VLLM_CPU_OMP_THREADS_BIND",
    ]
    assert environ == worker_environment(CPU, num_threads=1)
    assert apply(worker_profile(CPU, num_threads=1), environ) == ()


def test_apply_refuses_to_overwrite_and_changes_nothing() -> None:
    """The user's value stands, both values and the reason are named, nothing is half done."""
    environ = {"OMP_WAIT_POLICY": "active"}
    with pytest.raises(
        ProfileConflictError,
        match=r"OMP_WAIT_POLICY is 'active', the profile wants 'passive' \(spinning threads",
    ):
        apply(worker_profile(CPU, num_threads=1), environ)
    assert environ == {"OMP_WAIT_POLICY": "active"}


def test_zero_threads_are_refused() -> None:
    """A worker needs a thread."""
    with pytest.raises(ValueError, match=r"expected num_threads of at least 1, got 0"):
        worker_profile(CPU, num_threads=0)


def test_a_variable_is_set_once() -> None:
    """A profile that contradicts itself is refused at construction."""
    twice = Setting(name="A", value="1", reason="r", source="s")
    with pytest.raises(ValueError, match=r"profile 'p' sets A more than once"):
        Profile(name="p", settings=(twice, twice))


def test_apply_overwrites_what_it_is_told_to() -> None:
    """Only named variables may be replaced, and the change says what was there."""
    environ = {"OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": "9"}
    profile = worker_profile(CPU, num_threads=1)
    with pytest.raises(ProfileConflictError, match=r"GOMP_SPINCOUNT is '9'"):
        apply(profile, environ, overwrite=["OMP_WAIT_POLICY"])
    changes = apply(profile, environ, overwrite=["OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
    assert {change.name: change.before for change in changes} == {
        "OMP_NUM_THREADS": None,
        "OMP_WAIT_POLICY": "active",
        "GOMP_SPINCOUNT": "9",
        "VLLM_CPU_OMP_THREADS_BIND": None,
    }
    assert environ == profile.as_dict()


def test_a_later_layer_wins_and_says_over_what() -> None:
    """Layers go from general to particular; the reason that lost is kept."""
    general = Setting(name="A", value="1", reason="default", source="s")
    particular = Setting(name="A", value="2", reason="mine", source="t")
    other = Setting(name="B", value="1", reason="r", source="s")
    profile = layered(
        "p",
        Profile(name="x", settings=(general, other)),
        Profile(name="y", settings=(particular,)),
    )
    assert profile.as_dict() == {"A": "2", "B": "1"}
    assert profile.settings[0].reason == "mine (instead of 1: default)"


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
@pytest.mark.parametrize("kind", DEVICE_KINDS)
@pytest.mark.parametrize("release", ["0.23.0", "0.32.0"])
def test_every_profile_holds_against_the_registry(
    kind: DeviceKind, recipe: RecipeName, release: str
) -> None:
    """No profile sets what nobody reads, a value nobody takes, or a contradiction.

    Under the recipe's own configuration, with torch's default process-group timeout of 1800 s.
    """
    profile = profile_for(kind, recipe, num_threads=2)
    facts = attrs.evolve(RECIPES[recipe].facts, process_group_timeout_s=1800.0)
    versions = {"vllm": release, "torch": "2.13.0", "ray": "2.60.0"}
    if kind == "npu":
        versions |= {"vllm": "0.23.0", "vllm-ascend": "0.23.0", "torch-npu": "2.10.0"}
    judge = Judge(versions=versions, device_kind=kind, facts=facts)
    assert judge.environment(profile.as_dict()) == []
    for setting in profile.settings:
        assert setting.name in judge.registry, setting.name
        assert setting.reason, setting.name
        assert setting.source, setting.name


def test_rl_on_an_npu_turns_nz_off() -> None:
    """In-place weight updates need VLLM_ASCEND_ENABLE_NZ=0; sampling alone does not set it."""
    assert profile_for("npu", "colocated-rl", num_threads=1).as_dict()["VLLM_ASCEND_ENABLE_NZ"] == (
        "0"
    )
    assert "VLLM_ASCEND_ENABLE_NZ" not in profile_for("npu", "rollout", num_threads=1).as_dict()


def test_no_profile_slows_fsdp_down() -> None:
    """CUDA_DEVICE_MAX_CONNECTIONS is for Megatron only, so no profile sets it."""
    for kind in DEVICE_KINDS:
        for recipe in RECIPE_NAMES:
            names = profile_for(kind, recipe, num_threads=1).as_dict()
            assert "CUDA_DEVICE_MAX_CONNECTIONS" not in names


def test_an_unknown_recipe_is_refused() -> None:
    """A recipe that does not exist is answered with those that do."""
    with pytest.raises(ValueError, match=r"unknown recipe 'ppo'; known: rollout, colocated-rl"):
        profile_for("cpu", "ppo", num_threads=1)  # type: ignore[arg-type]


def test_export_is_a_script_that_bash_takes(capsys: pytest.CaptureFixture[str]) -> None:
    """The lines set what the profile says, in bash and for this package's own reader."""
    command = ["export", "--device", "npu", "--recipe", "colocated-rl", "--num-threads", "4"]
    assert main([*command, "--set", "HCCL_BUFFSIZE=300", "--set", "NOTE=it's here"]) == 0
    lines = capsys.readouterr().out
    wanted = profile_for(
        "npu",
        "colocated-rl",
        num_threads=4,
        user={"HCCL_BUFFSIZE": "300", "NOTE": "it's here"},
    ).as_dict()
    (launch,) = follow_script(lines).launches
    assert {name: value.text for name, value in launch.environ.items()} == wanted
    done = subprocess.run(
        ["bash", "-c", f"{lines}\nenv"], env={}, capture_output=True, text=True, check=True
    )
    seen = dict(line.partition("=")[::2] for line in done.stdout.splitlines())
    assert wanted.items() <= seen.items()
    assert "# new weights cannot be written in place into the NZ layout" in lines


def test_export_refuses_what_contradicts(capsys: pytest.CaptureFixture[str]) -> None:
    """A user's value that undoes the recipe's purpose prints no lines."""
    command = ["export", "--device", "npu", "--recipe", "colocated-rl"]
    ascend = ["--vllm", "0.23.0", "--vllm-ascend", "0.23.0"]
    assert main([*command, *ascend, "--set", "VLLM_ASCEND_ENABLE_NZ=1"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "in-place weight updates cannot write" in " ".join(printed.err.split())
    assert main([*command, "--process-group-timeout", "600"]) == 1
    assert "gives up after 600 s" in capsys.readouterr().err
    assert main([*command, "--num-threads", "0"]) == 2


@pytest.mark.parametrize(
    "name", ["NAME WITH", "A;rm", "1A", "", "A=B", "\N{LATIN SMALL LETTER E WITH ACUTE}A"]
)
def test_a_name_that_a_shell_would_not_take_is_refused(name: str) -> None:
    """`export NAME` is never quoted, so the name is checked."""
    with pytest.raises(ValueError, match=r"Setting: expected letters, digits and _ as a name"):
        profile_for("cpu", "rollout", num_threads=1, user={name: "1"})


def test_a_reason_stays_a_comment() -> None:
    """A line end in a reason does not make its rest a command."""
    setting = Setting(name="A", value="1", reason="because\ntouch /x", source="s")
    lines = shell_lines(Profile(name="p\nq", settings=(setting,))).splitlines()
    assert lines == ["# p q", "# because touch /x [s]", "export A=1"]


def test_a_conflict_shows_no_secret() -> None:
    """An error message ends in a log, so neither value of a key is in it."""
    profile = profile_for("cuda", "rollout", num_threads=1, user={"VLLM_API_KEY": "s3cret"})
    with pytest.raises(
        ProfileConflictError, match=r"VLLM_API_KEY is a value that is not shown"
    ) as c:
        apply(profile, {"VLLM_API_KEY": "0ther"})
    assert "s3cret" not in str(c.value)
    assert "0ther" not in str(c.value)
