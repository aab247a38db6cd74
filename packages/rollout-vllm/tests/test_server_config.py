"""Where a server listens and whom it answers: what a config may say, and where keys come from."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from rl_contracts.config import load_config
from rollout_vllm import ServerConfig, VllmConfig
from rollout_vllm.model_checks import check_model
from rollout_vllm.server_config import read_api_key
from rollout_vllm.versions import server_names


def config(server: ServerConfig | None, model: str = "m") -> VllmConfig:
    """A small config with this server."""
    return VllmConfig(model=model, max_model_len=64, kv_cache_gib=1.0, server=server)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "localhost"])
def test_this_machine_may_ask_without_a_key(host: str) -> None:
    """Loopback by any of its names."""
    assert ServerConfig(host=host).is_local


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.3", "sampler.cluster"])  # noqa: S104
def test_other_machines_need_a_key(host: str) -> None:
    """An address that others reach is refused without a key, and taken with one."""
    with pytest.raises(ValueError, match=r"can be reached from other machines.*give api_key_vari"):
        ServerConfig(host=host)
    assert not ServerConfig(host=host, api_key_variable="POLICY_KEY").is_local
    assert ServerConfig(host=host, api_key_file="key").asks_for_a_key


def test_impossible_settings_are_refused() -> None:
    """One place for the key, a port that exists, and names that are not empty."""
    with pytest.raises(ValueError, match=r"one of api_key_variable and api_key_file at most"):
        ServerConfig(api_key_variable="A", api_key_file="b")
    with pytest.raises(ValueError, match=r"'port' must be < 65536"):
        ServerConfig(port=65536)
    with pytest.raises(ValueError, match=r"ServerConfig: expected a model_name, got an empty one"):
        ServerConfig(model_name="")
    with pytest.raises(ValueError, match=r"ServerConfig: expected a api_key_file"):
        ServerConfig(api_key_file="")


def test_keys_come_from_the_environment_or_a_file(tmp_path: Path) -> None:
    """White space around them does not belong to them."""
    file = tmp_path / "key"
    file.write_text("  s3cret\n", encoding="utf-8")
    assert read_api_key(ServerConfig(api_key_file=str(file)), {}) == "s3cret"
    environment = {"POLICY_KEY": "s3cret"}
    assert read_api_key(ServerConfig(api_key_variable="POLICY_KEY"), environment) == "s3cret"
    assert read_api_key(ServerConfig(), environment) is None


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({}, r"expected a key in the environment variable POLICY_KEY \(api_key_variable\), found"),
        ({"POLICY_KEY": " "}, r"found none"),
        ({"POLICY_KEY": "two words"}, r"must be ASCII without spaces"),
        ({"POLICY_KEY": "schlüssel"}, r"must be ASCII without spaces"),
    ],
)
def test_keys_that_cannot_work_are_not_quoted(environment: Mapping[str, str], text: str) -> None:
    """The message says where the key was looked for, never what was found."""
    with pytest.raises(ValueError, match=text) as raised:
        read_api_key(ServerConfig(api_key_variable="POLICY_KEY"), environment)
    value = environment.get("POLICY_KEY", "").strip()
    assert not value or value not in str(raised.value)


def test_a_key_for_vllms_own_server_is_not_passed_over() -> None:
    """Who sets it expects that it is asked for."""
    environment = {"VLLM_API_KEY": "s3cret"}
    with pytest.raises(ValueError, match=r"VLLM_API_KEY is set, and ServerConfig names no key"):
        read_api_key(ServerConfig(), environment)
    assert read_api_key(ServerConfig(api_key_variable="VLLM_API_KEY"), environment) == "s3cret"


def test_a_file_without_key_is_named(tmp_path: Path) -> None:
    """A key file that is not there is no reason to ask for none."""
    with pytest.raises(ValueError, match=r"api_key_file .* is not a file"):
        read_api_key(ServerConfig(api_key_file=str(tmp_path / "none")), {})


def test_a_server_loads_the_tokenizer() -> None:
    """Without one, token ids go in and out and nothing else."""
    without = config(None).effective_engine_args()["skip_tokenizer_init"]
    assert without.value is True
    served = config(ServerConfig()).effective_engine_args()["skip_tokenizer_init"]
    assert served.value is False
    assert served.origin.startswith("derived from VllmConfig.server")


def test_a_server_is_a_section_of_the_config(tmp_path: Path) -> None:
    """Read strictly: a key in the config's text is an unknown setting."""
    text = 'model = "m"\nmax_model_len = 64\nkv_cache_gib = 1.0\n[server]\nport = 8000\n'
    file = tmp_path / "sampler.toml"
    file.write_text(text, encoding="utf-8")
    assert load_config(VllmConfig, file=file).value == config(ServerConfig(port=8000))
    file.write_text(text + 'api_key = "s3cret"\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"server.api_key"):
        load_config(VllmConfig, file=file)


def test_a_model_without_tokenizer_cannot_be_served(tmp_path: Path) -> None:
    """Refused before vLLM starts."""
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    check_model(config(None, str(tmp_path)))
    with pytest.raises(ValueError, match=r"server needs the model's tokenizer, and .* holds none"):
        check_model(config(ServerConfig(), str(tmp_path)))


def test_versions_that_are_not_served() -> None:
    """They are named, with those that are."""
    with pytest.raises(ValueError, match=r"vLLM 0.31.0 is not served .*; served: 0.25.x, 0.28.x"):
        server_names("0.31.0")
