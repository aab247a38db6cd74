"""vLLM's HTTP server code around our engine, with the endpoints that sample."""

import importlib
from argparse import ArgumentParser, Namespace
from collections.abc import Awaitable, Callable
from typing import cast

from fastapi import FastAPI
from vllm.utils.argparse_utils import FlexibleArgumentParser

from rollout_vllm.admission import Admission
from rollout_vllm.errors import StartError
from rollout_vllm.served_engine import ServedEngine
from rollout_vllm.server_config import ServerConfig
from rollout_vllm.versions import server_names
from rollout_vllm.vllm_engine import VllmEngine

ENDPOINTS = (
    ("GET", "/health"),
    ("GET", "/v1/models"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/inference/v1/generate"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
)
"""What is served. All else that vLLM's server would offer changes the engine, tells of the
machine, or has no test here."""


async def served_app(
    engine: VllmEngine, admission: Admission, config: ServerConfig, *, version: str
) -> FastAPI:
    """An application that answers from this engine.

    Args:
        engine: runs, with a tokenizer.
        admission: the sampler that the engine belongs to.
        config: the model's name and the parser of tool calls.
        version: of the installed vLLM.

    Raises:
        ValueError: if the model ends completions in another way than its tokenizer.
        StartError: if vLLM's server lacks one of the endpoints.
    """
    engine.check_end_of_sequence()
    names = server_names(version)
    arguments = _arguments(config, make_parser=_named(names["make_arg_parser"]))
    tasks = ("generate",)
    build_app = _named(names["build_app"])
    whole = cast("FastAPI", build_app(arguments, tasks, engine.served.model_config))
    routes = [
        route
        for route in whole.router.routes
        if any(
            getattr(route, "path", None) == path
            and method in (getattr(route, "methods", None) or ())
            for method, path in ENDPOINTS
        )
    ]
    if len(routes) != len(ENDPOINTS):
        found = sorted(str(getattr(route, "path", "")) for route in routes)
        raise StartError(
            f"vLLM {version}: expected the endpoints {sorted(path for _, path in ENDPOINTS)}, "
            f"found {found}"
        )
    # a fresh application: vLLM's middleware allows pages of any origin, and asks for other keys
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    app.router.routes.extend(routes)
    app.exception_handlers.update(whole.exception_handlers)
    init_app_state = cast("Callable[..., Awaitable[None]]", _named(names["init_app_state"]))
    await init_app_state(ServedEngine(engine, admission), app.state, arguments, tasks)
    app.state.server = None  # vLLM's handler of errors would stop it if the engine had died
    return app


def _named(name: str) -> Callable[..., object]:
    module, _, attribute = name.partition(":")
    found: Callable[..., object] = getattr(importlib.import_module(module), attribute)
    return found


def _arguments(config: ServerConfig, *, make_parser: Callable[..., object]) -> Namespace:
    """The arguments of vLLM's command line, of which its server reads its settings."""
    parser = cast("ArgumentParser", make_parser(FlexibleArgumentParser()))  # type: ignore[no-untyped-call]
    arguments: Namespace = parser.parse_args([])
    arguments.model = config.model_name  # clients are told of no folder
    arguments.served_model_name = [config.model_name]
    arguments.disable_log_stats = True
    arguments.enable_scale_out = True  # where /inference/v1/generate is, from 0.30 on
    arguments.tool_call_parser = config.tool_call_parser
    arguments.enable_auto_tool_choice = config.tool_call_parser is not None
    return arguments
