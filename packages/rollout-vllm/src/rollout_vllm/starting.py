"""What happens between a config and a sampler that runs."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rl_contracts.rollout import PolicyVersion
from rollout_vllm.admission import Admission
from rollout_vllm.config import VllmConfig
from rollout_vllm.environment import applied_environment, check_engine_environment
from rollout_vllm.headers import TensorHeader, read_model_headers
from rollout_vllm.readback import check_settings
from rollout_vllm.versions import installed_version

if TYPE_CHECKING:  # both import vLLM, or what comes with it
    from rollout_vllm.server import Server
    from rollout_vllm.vllm_engine import VllmEngine


def model_tensors(config: VllmConfig) -> Mapping[str, TensorHeader]:
    """Names and shapes of an update: of the model's weights, or of an adapter of it.

    None if the weights are random and no file lists them.

    Raises:
        ValueError: if the folder lists no weights and must, or if `VllmConfig.lora` names layers
            that the model does not have.
    """
    folder = Path(config.model)
    if config.load_format == "dummy" and not any(folder.glob("*.safetensors")):
        return {}
    model = read_model_headers(folder)
    return model if config.lora is None else config.lora.tensors(model)


def bound_server(config: VllmConfig) -> "Server | None":
    """The server, with its key read and its port taken; None if there shall be none.

    Raises:
        ValueError: if its key is not there.
        StartError: if its port is taken.
    """
    if config.server is None:
        return None
    from rollout_vllm.server import Server  # noqa: PLC0415  (imports what comes with vLLM)

    return Server.bound(config.server)


async def started_engine(
    config: VllmConfig, *, policy_version: PolicyVersion, tensors: Mapping[str, TensorHeader]
) -> "VllmEngine":
    """vLLM, running what was configured.

    Args:
        config: how to sample.
        policy_version: optimizer steps behind the weights in the folder.
        tensors: what `model_tensors` says.

    Raises:
        ValueError: if the environment contradicts the config, or vLLM does not know the server's
            parser of tool calls, or the model's tokenizer, where there is one, ends completions
            elsewhere than the model.
        StartError: if vLLM does not start, or runs something else than was configured.
    """
    arguments = config.effective_engine_args()
    with applied_environment(config):
        from rollout_vllm.vllm_engine import VllmEngine  # noqa: PLC0415  (imports vLLM)

        if config.server is not None:
            VllmEngine.check_tool_parser(config.server.tool_call_parser)
        engine = VllmEngine.start(
            # copies: vLLM 0.25 writes into the tables that it is given (speculative_config)
            {name: copy.deepcopy(argument.value) for name, argument in arguments.items()},
            device=config.device,
            serves=config.server is not None,
        )
    try:
        if config.images_per_prompt:
            engine.check_end_of_sequence()
        await engine.prepare(lora=config.lora, tensors=tensors)
        await engine.set_version(policy_version)
        if config.data_parallel_size > 1:
            await engine.spread_seeds()
        check_settings(arguments, await engine.settings())
        check_engine_environment(config, await engine.environment())
    except BaseException:
        engine.shutdown()
        raise
    return engine


async def serve(
    server: "Server", engine: "VllmEngine", admission: Admission, *, config: VllmConfig
) -> None:
    """Let the server answer from the engine.

    Raises:
        ValueError: if the model's tokenizer ends completions elsewhere than the model.
    """
    from rollout_vllm.served_app import served_app  # noqa: PLC0415  (imports vLLM)

    settings, version = config.server, installed_version()
    assert settings is not None  # noqa: S101  (the server was made from it)
    assert version is not None  # noqa: S101  (the engine runs)
    app = await served_app(engine, admission, settings, version=version)
    await server.start(app, admission)
