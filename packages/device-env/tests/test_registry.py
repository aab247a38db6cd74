"""The registry as data."""

import os
import subprocess
import sys

import pytest
from packaging.version import Version

from device_env import (
    Flag,
    Integer,
    NamesOf,
    Registry,
    UnknownVariableError,
    explain,
    known_names,
    known_versions,
    names_read_by_installed_vllm,
    snapshot,
)
from device_env.packages import installed_versions, providers_of
from device_env.rules import RULES

REGISTRY = Registry.load()


def test_every_variable_says_where_its_facts_are_from() -> None:
    """No entry is without a source and an owner, and no two versions contradict each other."""
    assert len(REGISTRY) == 179
    for variable in REGISTRY:
        assert variable.source, variable.name
        assert variable.component, variable.name
        for version in (variable.first_read, variable.last_read):
            if version is not None:
                assert variable.reading(version) == "read", (variable.name, version)
        assert variable.reader is not None or variable.never_read, variable.name


def test_registry_agrees_with_the_installed_vllm() -> None:
    """What the registry says of this vLLM is what stands in its vllm/envs.py, name by name."""
    (provider,) = providers_of("vllm")
    version = Version(installed_versions()[provider])
    names = names_read_by_installed_vllm(provider)
    judged = [variable for variable in REGISTRY if variable.reader == "vllm"]
    said = {variable.name: variable.reading(version) for variable in judged}
    true = {name: "read" if name in names else "not read" for name in said}
    unknown = {name for name, reading in said.items() if reading == "unknown"}
    assert {name for name in said if name not in unknown and said[name] != true[name]} == set()
    assert version.public != "0.32.0" or unknown == set()
    assert len(judged) == 58


@pytest.mark.parametrize(
    ("distribution", "version"),
    [
        (distribution, version)
        for distribution in ("vllm", "vllm-ascend")
        for version in known_versions(distribution)
    ],
)
def test_registry_agrees_with_published_wheels(distribution: NamesOf, version: str) -> None:
    """Of every wheel that tools/check_env_registry.py read, the registry says what it holds."""
    names = known_names(distribution, version)
    assert names is not None
    for variable in REGISTRY:
        if variable.reader == distribution:
            true = "read" if variable.name in names else "not read"
            assert variable.reading(Version(version)) in {"unknown", true}, variable.name


def test_enough_wheels_were_read() -> None:
    """At least four versions of each distribution, the pair 0.23.0 among them."""
    assert set(known_versions("vllm")) >= {"0.11.0", "0.15.0", "0.18.0", "0.23.0", "0.32.0"}
    assert set(known_versions("vllm-ascend")) >= {"0.11.0", "0.13.0", "0.18.0", "0.23.0"}
    assert known_names("vllm", "0.0.1") is None


def test_names_of_the_installed_vllm_are_those_of_its_wheel() -> None:
    """The names that ship with this package are what the installed vllm/envs.py holds."""
    (provider,) = providers_of("vllm")
    version = installed_versions()[provider]
    shipped = known_names("vllm", version)
    assert shipped is None or shipped == names_read_by_installed_vllm(provider)


def test_when_and_by_whom_has_a_source() -> None:
    """What is said about who sets a variable, and when, comes with where it is from."""
    for variable in REGISTRY:
        said = (variable.set_before, variable.set_by, variable.set_source)
        assert None not in said or set(said) == {None}, variable.name
    assert REGISTRY.lookup("HCCL_BUFFSIZE").set_before == "the process's first communicator"
    unknown = [variable.name for variable in REGISTRY if variable.set_before is None]
    assert len(unknown) == 41
    assert "the process's first communicator" in explain("HCCL_BUFFSIZE")


@pytest.mark.skipif(len(os.sched_getaffinity(0)) == 1, reason="one core has one thread anyway")
def test_threads_are_set_before_torch_is_imported() -> None:
    """OMP_NUM_THREADS counts when it is set before `import torch`, and not after it."""
    program = "import os; {0}import torch; {1}print(torch.get_num_threads())"
    line = "os.environ['OMP_NUM_THREADS'] = '1'; "

    def threads(before: str, after: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", program.format(before, after)],
            env={**os.environ, "OMP_NUM_THREADS": "2"},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        return done.stdout.strip()

    assert (threads(line, ""), threads("", line)) == ("1", "2")
    assert REGISTRY.lookup("OMP_NUM_THREADS").set_before == "import torch"


@pytest.mark.parametrize(
    ("name", "version", "reading"),
    [
        ("VLLM_USE_V1", "0.11.0", "read"),
        ("VLLM_USE_V1", "0.11.1", "not read"),
        ("VLLM_USE_V1", "0.10.0", "unknown"),
        ("VLLM_ALL2ALL_BACKEND", "0.15.0", "read"),
        ("VLLM_ALL2ALL_BACKEND", "0.15.1", "unknown"),
        ("VLLM_ALL2ALL_BACKEND", "0.16.0", "not read"),
        ("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "0.16.0", "not read"),
        ("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "0.25.1", "read"),
        ("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "0.32.0+cpu", "read"),
        ("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "0.33.0", "unknown"),
        ("VLLM_ASCEND_ENABLE_FLASHCOMM", "0.11.0rc0", "read"),
        ("VLLM_ASCEND_ENABLE_FLASHCOMM", "0.11.0rc1", "not read"),
        ("VLLM_ASCEND_ENABLE_FLASHCOMM1", "0.23.0", "read"),
        ("PER_STREAM_QUEUE", "2.8.0", "not read"),
        ("PER_STREAM_QUEUE", "2.9.0", "read"),
        ("VLLM_ENABLE_GRAPH_MODE", "0.32.0", "not read"),
        ("HCCL_BUFFSIZE", "8.5", "unknown"),
    ],
)
def test_reading_by_version(name: str, version: str, reading: str) -> None:
    """Between and beyond the versions looked at, unknown stays unknown."""
    assert REGISTRY.lookup(name).reading(Version(version)) == reading


def test_rows_with_several_names_became_variables() -> None:
    """Abbreviated names of the sources are written out."""
    for name in (
        "VLLM_TORCH_PROFILER_WITH_FLOPS",
        "VLLM_DP_MASTER_PORT",
        "HCCL_RDMA_RETRY_CNT",
        "VLLM_ASCEND_MLP_DOWN_PREFETCH_SIZE",
        "TORCH_HCCL_DESYNC_DEBUG",
        "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES",
    ):
        assert name in REGISTRY


def test_domains_are_structured() -> None:
    """Domains are values of a type, with units and with what the reader does otherwise."""
    timeout = REGISTRY.lookup("HCCL_CONNECT_TIMEOUT")
    assert timeout.domain == Integer(minimum=120, maximum=7200, unit="s", on_invalid=None)
    assert timeout.default == "120"
    assert REGISTRY.lookup("VLLM_ASCEND_ENABLE_MLAPO").domain == Flag(parser="int")


def test_unknown_name_is_refused_with_the_nearest() -> None:
    """A misspelt name is answered with the right one."""
    with pytest.raises(UnknownVariableError, match=r"did you mean VLLM_ATTENTION_BACKEND\?"):
        REGISTRY.lookup("VLLM_ATENTION_BACKEND")


def test_rules_are_about_registered_variables() -> None:
    """Each rule names variables that the registry explains."""
    for rule in RULES:
        for name in rule.variables:
            assert rule.text in " ".join(explain(name).split())


def test_explain_says_unknown() -> None:
    """What is not known is called unknown, what replaced the variable is named."""
    text = explain("VLLM_ATTENTION_BACKEND")
    assert "default       unknown" in text
    assert "vllm up to 0.14.0, since when is unknown" in text
    assert "vllm >= 0.15.0" in text
    assert "attention_backend" in text


def test_explain_of_a_name_beyond_the_registry() -> None:
    """Of a variable that only the wheels are known to read, that much is said and no more."""
    assert explain("VLLM_PORT") == (
        "VLLM_PORT\n  read by       vllm "
        "0.11.0, 0.11.1, 0.15.0, 0.18.0, 0.20.2, 0.23.0, 0.24.0, 0.28.0, 0.32.0\n"
        "  all else      unknown"
    )


def test_no_registered_name_is_a_secret() -> None:
    """Registered names are exempt from the secrecy rule, so none may carry a secret."""
    words = {word for variable in REGISTRY for word in variable.name.split("_")}
    assert not words & {"KEY", "TOKEN", "SECRET", "PASSWORD"}


def test_snapshot_keeps_what_matters_and_no_secret() -> None:
    """Secrets and the private part of an environment do not reach the run folder."""
    environ = {
        "VLLM_API_KEY": "k",
        "HF_TOKEN": "t",
        "RAY_REDIS_PASSWORD": "p",
        "hf_secret": "s",
        "HF_ENDPOINT": "https://user:word@hub.example",
        "HF_HOME": "/cache",
        "HOME": "/root",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "NCCL_SOCKET_IFNAME": "eth0",
    }
    assert snapshot(environ) == {
        "HF_HOME": "/cache",
        "NCCL_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HF_PASS", "s3cret"),
        ("RAY_PWD", "s3cret"),
        ("TORCH_PASSPHRASE", "s3cret"),
        ("VLLM_ARGS", "--api-key s3cret"),
        ("VLLM_URL", "https://host/?token=s3cret"),
        ("VLLM_PROXY", "user:s3cret@host:80"),
        ("NCCL_HEADER", "Authorization: Bearer s3cret"),
        ("HF_X", "hf_abcdefgh"),
        ("RAY_JOB", '{"env_vars": {"HF_TOKEN": "s3cret"}}'),
    ],
)
def test_snapshot_leaves_out_what_looks_like_a_secret(name: str, value: str) -> None:
    """A secret is known by its name, by its form, or by the option in front of it."""
    assert snapshot({name: value}) == {}


@pytest.mark.parametrize(
    "environ",
    [
        {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:128"},
        {"CUDA_VISIBLE_DEVICES": "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"},
        {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
        {"NCCL_IB_HCA": "mlx5_0:1,mlx5_1:1"},
        {"RAY_ADDRESS": "http://10.0.0.1:8265"},
        {"LD_LIBRARY_PATH": "/opt/a:/opt/b"},
    ],
)
def test_snapshot_keeps_what_only_resembles_one(environ: dict[str, str]) -> None:
    """Lists with colons, ids and addresses are no secrets."""
    assert snapshot(environ) == environ
