"""Where a sampler's HTTP server listens, and whom it answers."""

import ipaddress
from collections.abc import Mapping
from pathlib import Path

import attrs

# vLLM's own server takes a key from it; a user who sets it expects that it is asked for
_VLLM_KEY_VARIABLE = "VLLM_API_KEY"


def _not_empty(instance: object, attribute: "attrs.Attribute[str]", value: str) -> None:
    if not value:
        raise ValueError(
            f"{type(instance).__name__}: expected a {attribute.name}, got an empty one"
        )


@attrs.frozen(kw_only=True)
class ServerConfig:
    """An HTTP server in vLLM's words (those of OpenAI's API) in front of a sampler's engine.

    It speaks plain HTTP. On other addresses than loopback the key crosses the network as it is:
    put a proxy that speaks TLS before it.
    """

    host: str = attrs.field(default="127.0.0.1", validator=_not_empty)
    """Address to listen on. Default: loopback, so only this machine; others need a key."""

    port: int = attrs.field(
        default=0,
        validator=attrs.validators.and_(attrs.validators.ge(0), attrs.validators.lt(2**16)),
    )
    """TCP port; 0, the default: a free one, which `VllmSampler.server_url` tells."""

    api_key_variable: str | None = attrs.field(
        default=None, validator=attrs.validators.optional(_not_empty)
    )
    """Environment variable that holds the key which clients must send. A config holds no key."""

    api_key_file: str | None = attrs.field(
        default=None, validator=attrs.validators.optional(_not_empty)
    )
    """File whose text is that key, white space around it apart."""

    model_name: str = attrs.field(default="policy", validator=_not_empty)
    """What clients call the model. Default: not the model's folder, which is nobody's business."""

    tool_call_parser: str | None = attrs.field(
        default=None, validator=attrs.validators.optional(_not_empty)
    )
    """vLLM's parser that finds calls of tools in what the model writes, such as "hermes" for
    Qwen; None: clients cannot leave it to the model whether it calls a tool."""

    def __attrs_post_init__(self) -> None:
        """Refuse a server that anybody on the network could use."""
        if self.api_key_variable is not None and self.api_key_file is not None:
            message = (
                "ServerConfig: expected one of api_key_variable and api_key_file at most, got "
                f"{self.api_key_variable!r} and {self.api_key_file!r}"
            )
            raise ValueError(message)
        if not self.is_local and not self.asks_for_a_key:
            message = (
                f"ServerConfig: host = {self.host!r} can be reached from other machines, and "
                "nothing would be asked of them; give api_key_variable or api_key_file, or "
                "host = '127.0.0.1'"
            )
            raise ValueError(message)

    @property
    def asks_for_a_key(self) -> bool:
        """Whether clients must send a key."""
        return self.api_key_variable is not None or self.api_key_file is not None

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def read_api_key(config: ServerConfig, environment: Mapping[str, str]) -> str | None:
    """The key that clients must send; None if none is asked for. No message ever holds it.

    Args:
        config: where it stands.
        environment: the process's environment variables.

    Raises:
        ValueError: if it is not there, is empty, or is no text that fits in an HTTP header.
    """
    if config.api_key_file is not None:
        file = Path(config.api_key_file)
        if not file.is_file():
            raise ValueError(f"ServerConfig: api_key_file {config.api_key_file!r} is not a file")
        # undecodable bytes become characters that are refused below: an error would quote them
        key = file.read_text(encoding="ascii", errors="replace").strip()
        source = f"the file {config.api_key_file!r} (api_key_file)"
    elif config.api_key_variable is not None:
        key = environment.get(config.api_key_variable, "").strip()
        source = f"the environment variable {config.api_key_variable} (api_key_variable)"
    elif environment.get(_VLLM_KEY_VARIABLE):
        message = (
            f"environment: {_VLLM_KEY_VARIABLE} is set, and ServerConfig names no key, so none "
            f"would be asked for; give api_key_variable = {_VLLM_KEY_VARIABLE!r}, or unset it"
        )
        raise ValueError(message)
    else:
        return None
    if not key:
        raise ValueError(f"ServerConfig: expected a key in {source}, found none")
    if not all("!" <= character <= "~" for character in key):
        message = (
            f"ServerConfig: the key in {source} must be ASCII without spaces, to fit in an HTTP "
            "header"
        )
        raise ValueError(message)
    return key
