"""Judging an environment."""

import pytest

from device_env import Finding, Judge, RunFacts, check_environment

VLLM = {"vllm": "0.32.0"}
ASCEND = {"vllm": "0.23.0", "vllm-ascend": "0.23.0", "torch-npu": "2.10.0"}


def only(findings: list[Finding]) -> Finding:
    """The one finding that is expected."""
    (finding,) = findings
    return finding


def test_variables_that_nobody_reads_are_named_with_their_replacement() -> None:
    """With vLLM 0.32 both classics are warned of, with what does the job now (case A47)."""
    environ = {"VLLM_ATTENTION_BACKEND": "FLASH_ATTN", "VLLM_USE_V1": "1"}
    backend, engine = check_environment(environ, VLLM)
    assert (backend.level, backend.variable) == ("warning", "VLLM_ATTENTION_BACKEND")
    assert backend.message == ("vllm 0.32.0 does not read it (last read by 0.14.0, gone in 0.15.0)")
    assert "the engine argument attention_backend" in backend.fix
    assert (engine.level, engine.variable) == ("warning", "VLLM_USE_V1")
    assert "the V0 engine is gone" in engine.fix


def test_variables_that_are_read_are_left_alone() -> None:
    """An environment in which everything takes effect has no finding."""
    environ = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_ROCM_USE_AITER": "True",
        "HCCL_CONNECT_TIMEOUT": "1800",
        "OMP_NUM_THREADS": "1",
        "HOME": "/root",
    }
    assert check_environment(environ, VLLM) == []


def test_a_dead_ascend_script_is_taken_apart() -> None:
    """The five dead variables of verl's NPU script for GSPO are found, and only they."""
    environ = {
        "VLLM_USE_V1": "1",
        "VLLM_ATTENTION_BACKEND": "XFORMERS",
        "VLLM_ASCEND_ENABLE_FLASHCOMM": "1",
        "VLLM_ASCEND_ENABLE_PREFETCH_MLP": "1",
        "VLLM_ASCEND_ENABLE_DENSE_OPTIMIZE": "1",
        "TASK_QUEUE_ENABLE": "1",
        "HCCL_CONNECT_TIMEOUT": "1500",
    }
    dead = [found.variable for found in check_environment(environ, ASCEND)]
    assert dead == sorted(name for name in environ if name.startswith("VLLM_"))


def test_a_variable_too_new_for_its_reader_is_named() -> None:
    """TORCH_HCCL_* is inert on torch_npu 2.10, which reads the old name."""
    found = only(check_environment({"TORCH_HCCL_ASYNC_ERROR_HANDLING": "1"}, ASCEND))
    assert (
        found.message
        == "torch-npu 2.10.0 does not read it (known to be read from 2.11.0.post3 to 2.14.0)"
    )


def test_a_deprecated_variable_is_named() -> None:
    """The old name still works on torch_npu 2.14, and warns."""
    found = only(check_environment({"HCCL_ASYNC_ERROR_HANDLING": "1"}, {"torch-npu": "2.14.0"}))
    assert found.message == "deprecated in torch-npu 2.11.0.post3"
    assert "TORCH_HCCL_ASYNC_ERROR_HANDLING" in found.fix


def test_without_a_version_nothing_is_judged() -> None:
    """A component whose version is not given is named, not guessed."""
    found = only(check_environment({"VLLM_USE_V1": "1"}, {}))
    assert (found.level, found.message) == (
        "note",
        "not judged: read by vllm, whose version was not given",
    )


def test_a_version_beyond_those_looked_at_is_not_judged() -> None:
    """For a newer vLLM the registry says what it knows; the names of that vLLM decide."""
    environ = {"VLLM_SERVER_DEV_MODE": "1"}
    newer = {"vllm": "0.99.0"}
    found = only(check_environment(environ, newer))
    assert found.level == "note"
    assert found.message == (
        "not judged: vllm 0.99.0 is not among the versions looked at "
        "(known to be read from 0.11.0 to 0.32.0)"
    )
    assert check_environment(environ, newer, vllm_names=["VLLM_SERVER_DEV_MODE"]) == []
    assert only(check_environment(environ, newer, vllm_names=[])).level == "warning"


def test_a_component_that_is_not_installed_has_no_reader() -> None:
    """A variable of a component that is known to be absent has no effect."""
    found = only(check_environment({"TASK_QUEUE_ENABLE": "1"}, VLLM, not_installed=["torch-npu"]))
    assert (found.level, found.message) == (
        "warning",
        "nobody reads it here: torch-npu is not installed",
    )


def test_a_name_that_vllm_does_not_know_is_answered_with_the_nearest() -> None:
    """With the list of names that vLLM reads, a misspelt one is found."""
    found = only(
        check_environment({"VLLM_PORTS": "1"}, VLLM, vllm_names=["VLLM_PORT", "VLLM_HOST_IP"])
    )
    assert found.message == "vllm 0.32.0 does not read it"
    assert found.fix == "did you mean VLLM_PORT?"


def test_a_name_beyond_the_registry_is_reported_and_not_judged() -> None:
    """Of a vLLM that was not looked at, an unregistered name is unknown; its names decide."""
    newer = {"vllm": "0.99.0"}
    found = only(check_environment({"VLLM_PORT": "1"}, newer))
    assert (found.level, found.message) == ("note", "not judged: the registry does not know it")
    found = only(check_environment({"VLLM_PORT": "1"}, newer, vllm_names=["VLLM_PORT"]))
    assert found.level == "note"
    assert found.message == (
        "vllm 0.99.0 reads it; its value is not judged: the registry does not know it"
    )


def test_names_of_versions_looked_at_are_known() -> None:
    """For a vLLM whose wheel was read, any name is judged, also beyond the registry."""
    read = only(check_environment({"VLLM_PORT": "1"}, {"vllm": "0.23.0"}))
    assert (read.level, read.message[:20]) == ("note", "vllm 0.23.0 reads it")
    found = only(check_environment({"VLLM_PORTS": "1"}, {"vllm": "0.23.0+cpu"}))
    assert found.message == "vllm 0.23.0+cpu does not read it"
    assert found.fix == "did you mean VLLM_PORT?"


@pytest.mark.parametrize(
    ("name", "value", "level", "message"),
    [
        ("VLLM_ASCEND_ENABLE_MLAPO", "true", "error", "its reader calls int() and stops on it"),
        ("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "yes", "error", "got 'yes', which counts as false"),
        ("VLLM_SKIP_P2P_CHECK", "true", "error", "got 'true', which counts as false"),
        ("VLLM_WORKER_MULTIPROC_METHOD", "forkserver", "error", "expected spawn, fork, got"),
        ("VLLM_ENGINE_READY_TIMEOUT_S", "10m", "error", "expected integer, in s, got '10m'"),
        ("HCCL_CONNECT_TIMEOUT", "60", "error", "at least 120, at most 7200, in s, got 60"),
        ("COMBINED_ENABLE", "on", "warning", "how its reader takes that is unknown"),
    ],
)
def test_values_outside_the_domain(name: str, value: str, level: str, message: str) -> None:
    """A value is an error where its reader is known to stop or to take another one."""
    versions = {**ASCEND, "vllm": "0.32.0"}
    found = only(check_environment({name: value}, versions))
    assert (found.level, found.variable) == (level, name)
    assert message in found.message


def test_words_are_right_where_words_are_compared() -> None:
    """DYNAMIC_EPLB takes words, unlike the other vllm-ascend switches."""
    assert check_environment({"DYNAMIC_EPLB": "True"}, ASCEND) == []


@pytest.mark.parametrize(
    ("environ", "level", "message"),
    [
        (
            {"HCCL_OP_EXPANSION_MODE": "AIV", "HCCL_EXEC_TIMEOUT": "3600"},
            "error",
            "3600 s becomes 1091 s under HCCL_OP_EXPANSION_MODE=AIV",
        ),
        (
            {"HCCL_OP_EXPANSION_MODE": "AIV", "HCCL_DETERMINISTIC": "true"},
            "error",
            "AIV is off while HCCL_DETERMINISTIC=true",
        ),
        (
            {"TASK_QUEUE_ENABLE": "1", "ASCEND_LAUNCH_BLOCKING": "1"},
            "warning",
            "1 has no effect while ASCEND_LAUNCH_BLOCKING=1",
        ),
        (
            {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:128"},
            "error",
            "expandable_segments:True excludes max_split_size_mb",
        ),
        ({"VLLM_VERSION": "0.13.0"}, "error", "code paths of 0.13.0, but vllm is 0.23.0"),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "warning", "has no meaning on an NPU"),
        ({"ASCEND_RT_VISIBLE_DEVICES": "0,0"}, "error", "lists '0' twice"),
    ],
)
def test_rules_of_the_environment(environ: dict[str, str], level: str, message: str) -> None:
    """Variables that undo each other are found on an NPU."""
    found = only(check_environment(environ, ASCEND, device_kind="npu"))
    assert found.level == level
    assert message in found.message


@pytest.mark.parametrize(
    "environ",
    [
        {"HCCL_OP_EXPANSION_MODE": "AIV", "HCCL_EXEC_TIMEOUT": "1091"},
        {"HCCL_OP_EXPANSION_MODE": "AIV", "HCCL_DETERMINISTIC": "false"},
        {"TASK_QUEUE_ENABLE": "1", "ASCEND_LAUNCH_BLOCKING": "0"},
        {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:False,max_split_size_mb:128"},
        {"VLLM_VERSION": "0.23.0"},
        {"ASCEND_RT_VISIBLE_DEVICES": "0,1"},
    ],
)
def test_rules_are_silent_next_to_their_bounds(environ: dict[str, str]) -> None:
    """The nearest right value of each rule passes."""
    assert check_environment(environ, ASCEND, device_kind="npu") == []


@pytest.mark.parametrize(
    ("environ", "facts", "message"),
    [
        (
            {"HCCL_EXEC_TIMEOUT": "1800"},
            RunFacts(process_group_timeout_s=1800),
            "gives up after 1800 s, before HCCL_EXEC_TIMEOUT=1800 s",
        ),
        (
            {"TASK_QUEUE_ENABLE": "2"},
            RunFacts(enforce_eager=False),
            "2 does not work with ACL graph",
        ),
        (
            {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"},
            RunFacts(sleep_mode=True),
            "sleep mode asserts that expandable_segments is off",
        ),
        (
            {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
            RunFacts(training_engine="veomni"),
            "1 keeps the communication of veomni (FSDP2)",
        ),
        ({}, RunFacts(online_weight_update=True), "unset, hence 1, casts weights"),
    ],
)
def test_rules_with_the_configuration(
    environ: dict[str, str], facts: RunFacts, message: str
) -> None:
    """Rules that need the run's configuration speak when told, and only then."""
    assert message in only(check_environment(environ, ASCEND, facts=facts)).message
    assert check_environment(environ, ASCEND) == []


def test_both_allocator_variables() -> None:
    """torch_npu 2.11 refuses both allocator variables, 2.10 ignores the neutral one."""
    environ = {
        "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    }
    versions = {"torch": "2.13.0"}
    new = check_environment(environ, {**versions, "torch-npu": "2.12.0.post3"})
    old = check_environment(environ, {**versions, "torch-npu": "2.10.0"})
    assert only(new).level == "error"
    assert (only(old).level, only(old).variable) == ("warning", "PYTORCH_ALLOC_CONF")


def test_rocr_and_hip_are_a_note_and_rocr_alone_stops_ray() -> None:
    """Legal but easily misread combinations are notes; what Ray raises on is an error."""
    both = {"ROCR_VISIBLE_DEVICES": "4,6", "HIP_VISIBLE_DEVICES": "1"}
    assert only(check_environment(both, {"ray": "2.60.0"}, device_kind="rocm")).level == "note"
    alone = {"ROCR_VISIBLE_DEVICES": "4,6"}
    found = only(check_environment(alone, {"ray": "2.60.0"}, device_kind="rocm"))
    assert (found.level, found.fix) == ("error", "use HIP_VISIBLE_DEVICES=4,6 instead")


def test_hccl_defaults_count_on_an_npu() -> None:
    """Unset, HCCL_EXEC_TIMEOUT is 1836 s (1091 s under AIV) and torch's default group 1800 s."""
    facts = RunFacts(process_group_timeout_s=1800)
    found = only(check_environment({}, ASCEND, device_kind="npu", facts=facts))
    assert found.message == (
        "the process group gives up after 1800 s, before HCCL_EXEC_TIMEOUT=1836 s, its default"
    )
    aiv = {"HCCL_OP_EXPANSION_MODE": "AIV"}
    assert check_environment(aiv, ASCEND, device_kind="npu", facts=facts) == []
    assert check_environment({}, ASCEND, device_kind="cuda", facts=facts) == []


def test_two_allocator_variables_that_differ_are_an_error_on_cuda() -> None:
    """torch's CUDA allocator and vLLM do not take the same one of the two."""
    environ = {
        "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:100",
        "PYTORCH_ALLOC_CONF": "max_split_size_mb:200",
    }
    versions = {"torch": "2.13.0"}
    found = only(check_environment(environ, versions, device_kind="cuda"))
    assert (found.level, found.variable) == ("error", "PYTORCH_CUDA_ALLOC_CONF")
    same = dict.fromkeys(environ, "max_split_size_mb:100")
    assert check_environment(same, versions, device_kind="cuda") == []


def test_expandable_segments_and_the_sleep_mode_of_vllm() -> None:
    """Up to vLLM 0.18 sleep mode asserts against them on a GPU, from 0.23 it copes."""
    environ = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    asleep = RunFacts(sleep_mode=True)
    versions = {"torch": "2.10.0", "vllm": "0.18.0"}
    found = only(check_environment(environ, versions, device_kind="cuda", facts=asleep))
    assert found.message == "the sleep mode of vllm 0.18.0 asserts that expandable_segments is off"
    newer = {**versions, "vllm": "0.23.0"}
    assert check_environment(environ, newer, device_kind="cuda", facts=asleep) == []
    awake = RunFacts(sleep_mode=False)
    assert check_environment(environ, versions, device_kind="cuda", facts=awake) == []


def test_nvlink_sharp_needs_cumem() -> None:
    """NCCL_CUMEM_ENABLE=0 turns NVLS off, whatever NCCL_NVLS_ENABLE says."""
    found = only(check_environment({"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "1"}, {}))
    assert found.message == "1 has no effect while NCCL_CUMEM_ENABLE=0"
    assert check_environment({"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}, {}) == []


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("HCCL_CONNECT_TIMEOUT", "-+5", "got '-+5'; what its reader does with that is unknown"),
        ("HCCL_CONNECT_TIMEOUT", "\N{DEVANAGARI DIGIT ONE}500", "expected integer, at least 120"),
        ("HCCL_OP_EXPANSION_MODE", "aiv", "expected AIV, got 'aiv': its reader silently takes"),
        ("HCCL_OP_EXPANSION_MODE", '"AIV"', "expected AIV, got"),
        ("OMP_NUM_THREADS", "0", "expected integers of at least 1, with commas between them"),
        ("OMP_NUM_THREADS", "", "got '': its reader silently takes the default instead"),
        ("OMP_NUM_THREADS", "4,x", "expected integers of at least 1"),
    ],
)
def test_text_that_only_looks_like_the_value(name: str, value: str, message: str) -> None:
    """Signs, digits of other scripts, another case and quotes that came along are found."""
    assert message in only(check_environment({name: value}, ASCEND)).message


@pytest.mark.parametrize(("name", "value"), [("OMP_NUM_THREADS", "4,2"), ("HCCL_BUFFSIZE", " 9 ")])
def test_text_that_is_the_value(name: str, value: str) -> None:
    """Threads by nesting level, and space around a number, are taken as meant."""
    assert check_environment({name: value}, ASCEND) == []


def test_a_name_in_another_case_is_another_name() -> None:
    """Names are told apart by case, so a variable in small letters reaches nobody."""
    found = only(check_environment({"hccl_buffsize": "200"}, ASCEND))
    assert (found.level, found.fix) == ("warning", "write HCCL_BUFFSIZE")
    assert found.message == "is not HCCL_BUFFSIZE: names are told apart by their case"
    assert check_environment({"http_proxy": "x"}, ASCEND) == []


def test_a_misspelt_name_is_asked_about() -> None:
    """A name one letter away from a known one is a note; a real neighbour is left alone."""
    found = only(check_environment({"HCCL_CONECT_TIMEOUT": "1"}, ASCEND))
    assert (found.level, found.fix) == ("note", "did you mean HCCL_CONNECT_TIMEOUT?")
    assert check_environment({"NCCL_IBEXT_DISABLE": "1", "NCCL_DEBUG_FILE": "x"}, ASCEND) == []


def test_names_of_vllm_ascend_versions_are_known() -> None:
    """Of a vllm-ascend whose wheel was read, any VLLM_ASCEND_ name is judged."""
    found = only(check_environment({"VLLM_ASCEND_ENABLE_NZZ": "0"}, ASCEND))
    assert (found.level, found.message) == (
        "warning",
        "vllm-ascend 0.23.0 does not read it",
    )
    assert found.fix.startswith("did you mean VLLM_ASCEND_ENABLE_NZ ")
    newer = {**ASCEND, "vllm-ascend": "0.99.0"}
    assert only(check_environment({"VLLM_ASCEND_ENABLE_NZZ": "0"}, newer)).level == "note"


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        ({"vllm": "latest"}, r"versions: vllm: expected a version such as 0.32.0, got 'latest'"),
        ({"vllm": ""}, r"versions: vllm: expected a version such as 0.32.0, got ''"),
        ({"vLLM": "0.32.0"}, r"versions: expected the name 'vllm', got 'vLLM'"),
        ({"vllm_ascend": "0.23.0"}, r"versions: expected the name 'vllm-ascend', got 'vllm_asc"),
    ],
)
def test_versions_that_would_be_passed_over_are_refused(
    versions: dict[str, str], message: str
) -> None:
    """A misspelt distribution judges nothing, so it is refused."""
    with pytest.raises(ValueError, match=message):
        Judge(versions=versions)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_a_timeout_is_a_positive_number(seconds: float) -> None:
    """What is no duration would turn the rule about timeouts off."""
    with pytest.raises(ValueError, match=r"expected a positive number of seconds, got"):
        RunFacts(process_group_timeout_s=seconds)


def test_a_visible_devices_variable_of_another_kind_is_inert() -> None:
    """CUDA_VISIBLE_DEVICES chooses no NPU; ROCm reads it, and Ray's empty value is meant."""
    environ = {"CUDA_VISIBLE_DEVICES": "0,1"}
    found = only(check_environment(environ, ASCEND, device_kind="npu"))
    assert found.message == "'0,1' chooses no device: nobody reads it on npu"
    assert found.fix == "use ASCEND_RT_VISIBLE_DEVICES, or remove it"
    assert check_environment(environ, {}, device_kind="rocm") == []
    assert check_environment({"CUDA_VISIBLE_DEVICES": ""}, ASCEND, device_kind="npu") == []
