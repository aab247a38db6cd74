"""Compare the names of vLLM that rollout-vllm uses with those that published wheels hold.

    uv run tools/check_vllm_arguments.py                    every wheel of the committed facts
    uv run tools/check_vllm_arguments.py vllm==0.25.1       one of them
    uv run tools/check_vllm_arguments.py vllm==0.33.0 --write

Each wheel is put into a temporary folder (up to 1 GB for vllm), without its dependencies, and
only its source text is read; nothing of it is imported. NAME==VERSION=FOLDER reads a folder that
holds the unpacked wheel already. The exit status is 1 if a wheel says something else than
`packages/rollout-vllm/tests/vllm_names.json`, which the package's tests read offline.
"""

import argparse
import ast
import json
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

FACTS = Path("packages/rollout-vllm/tests/vllm_names.json")
PACKAGE = Path("packages/rollout-vllm/src/rollout_vllm")
ARGUMENTS = ("vllm.engine.arg_utils", ("EngineArgs", "AsyncEngineArgs"))
# what the package uses of a class beyond importing it: attributes, methods, fields
MEMBERS = {
    "vllm.v1.engine.async_llm:AsyncLLM": (
        "from_engine_args add_request abort pause_generation resume_generation reset_prefix_cache "
        "collective_rpc get_supported_tasks init_weight_transfer_engine start_weight_update "
        "update_weights finish_weight_update update_weight_version sleep wake_up is_sleeping "
        "shutdown errored model_config output_processor engine_core generate vllm_config renderer "
        "input_processor"
    ),
    "vllm.v1.engine.core_client:AsyncMPClient": "outputs_queue",
    "vllm.v1.engine.core_client:MPClient": "engine_ranks_managed resources",
    "vllm.v1.engine.output_processor:OutputProcessor": "request_states",
    "vllm.v1.engine.output_processor:RequestState": "external_req_id detokenizer",
    "vllm.v1.engine.detokenizer:IncrementalDetokenizer": "num_output_tokens",
    "vllm.v1.engine.output_processor:RequestOutputCollector": "get get_nowait request_id",
    "vllm.v1.engine:EngineCoreOutputs": "outputs scheduler_stats",
    "vllm.sampling_params:SamplingParams": (
        "temperature top_p top_k max_tokens min_tokens stop_token_ids seed logprobs flat_logprobs "
        "detokenize output_kind skip_clone"
    ),
    "vllm.sampling_params:RequestOutputKind": "DELTA FINAL_ONLY",
    "vllm.outputs:CompletionOutput": (
        "token_ids logprobs finish_reason routed_experts weight_versions"
    ),
    "vllm.outputs:RequestOutput": "outputs finished",
    "vllm.logprobs:FlatLogprobs": "logprobs",
    "vllm.usage.usage_lib:UsageContext": "LLM_CLASS",
    "vllm.exceptions:VLLMError": "",
    "vllm.config:ModelConfig": (
        "max_model_len get_vocab_size hf_text_config enable_sleep_mode generation_config "
        "try_get_generation_config"
    ),
    "vllm.config:ParallelConfig": "worker_extension_cls data_parallel_index",
    "vllm.distributed.weight_transfer.base:WeightTransferEngine": (
        "__init__ init_transfer_engine start_weight_update update_weights receive_weights "
        "finish_weight_update shutdown trainer_send_weights"
    ),
    "vllm.distributed.weight_transfer.factory:WeightTransferEngineFactory": (
        "register_engine create_engine _registry"
    ),
    "vllm.v1.attention.backends.registry:AttentionBackendEnum": (
        "FLASH_ATTN TRITON_ATTN FLEX_ATTENTION FLASHINFER FLASH_ATTN_MLA FLASHMLA FLASHINFER_MLA "
        "CUTLASS_MLA TRITON_MLA"
    ),
    "vllm.config:SpeculativeConfig": (
        "method num_speculative_tokens prompt_lookup_min prompt_lookup_max"
    ),
    "vllm.config.quantization:_ONLINE_SHORTHANDS": "",
    "vllm.config:VllmConfig": "lora_config",
    "vllm.config.lora:LoRAConfig": "max_lora_rank max_loras target_modules",
    "vllm.lora.lora_model:LoRAModel": "__init__",
    "vllm.lora.lora_weights:LoRALayerWeights": "__init__",
    "vllm.lora.model_manager:LoRAModelManager": (
        "modules packed_modules punica_wrapper_mapping add_adapter activate_adapter remove_adapter"
    ),
    "vllm.lora.punica_wrapper.punica_cpu:PunicaWrapperCPU": "add_lora_linear",
    "vllm.lora.request:LoRARequest": "lora_name lora_int_id lora_path",
    "vllm.v1.sample.rejection_sampler:apply_sampling_constraints": "",
    "vllm.v1.sample.rejection_sampler:expand_batch_to_tokens": "",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner": (
        "attn_groups intermediate_tensors profile_run"
    ),
    "vllm.v1.worker.gpu_worker:Worker": "sleep wake_up model_runner",
    "vllm.v1.worker.worker_base:WorkerBase": "vllm_config",
    "vllm.renderers:BaseRenderer": "get_eos_token_id",
    "vllm.tool_parsers:ToolParserManager": "list_registered",
    # where the server is made: rollout_vllm.versions.SERVER_NAMES
    "vllm.entrypoints.launchers.app:build_app": "",
    "vllm.entrypoints.launchers.api_server.app_state:init_app_state": "",
    "vllm.entrypoints.launchers.cli_args:make_arg_parser": "",
    "vllm.entrypoints.openai.api_server:build_app": "",
    "vllm.entrypoints.openai.api_server:init_app_state": "",
    "vllm.entrypoints.openai.cli_args:make_arg_parser": "",
    "vllm.platforms.cpu:CpuPlatform": "device_name",
    "vllm.platforms.cuda:CudaPlatformBase": "device_name",
    "vllm_ascend.platform:NPUPlatform": "device_name",
    "vllm_ascend.worker.worker:NPUWorker": "sleep wake_up",
    "vllm_ascend.distributed.weight_transfer:register_engine": "",
    "vllm_ascend.distributed.weight_transfer.hccl_engine:HCCLWeightTransferEngine": (
        "__init__ receive_weights trainer_send_weights trainer_init"
    ),
    "vllm_ascend.distributed.weight_transfer.npu_ipc_engine:NPUIPCWeightTransferEngine": (
        "__init__ receive_weights trainer_send_weights"
    ),
}
SOURCE = (
    "source text of the wheels named here; arguments: fields of EngineArgs and AsyncEngineArgs in "
    "vllm/engine/arg_utils.py; names: parameters, '' where there are none, null where a wheel has "
    "no such name; numbers count the wheels from 0"
)
Facts = dict[str, dict[str, str | None]]
"""Table ("arguments", "names") -> name -> signature; None where the wheel has no such name."""


def main() -> int:
    """Read every wheel that is named; 1 when one of them says something new."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("wheels", nargs="*", metavar="NAME==VERSION[=FOLDER]")
    parser.add_argument("--write", action="store_true", help="keep what was found")
    arguments = parser.parse_args()
    known = read_facts()
    changed = 0
    for wanted in arguments.wheels or list(known):
        wheel, _, folder = wanted.replace("==", " ").partition("=")
        with tempfile.TemporaryDirectory() as temporary:
            root = Path(folder) if folder else unpacked(wheel.replace(" ", "=="), Path(temporary))
            found = facts_in(root, distribution=wheel.split()[0])
        differences = compare(known.get(wheel, {}), found)
        print(f"{wheel}: {sum(map(len, found.values()))} names, {len(differences)} differences")
        for text in differences:
            print(f"  {text}")
        changed += len(differences)
        known[wheel] = found
    if arguments.write:
        write_facts(known)
        return 0
    return 1 if changed else 0


def unpacked(requirement: str, folder: Path) -> Path:
    """The files of one wheel, without its dependencies, for the platform that it is made for."""
    platform = (
        "aarch64-manylinux_2_35"
        if requirement.startswith("vllm-ascend")
        else "x86_64-manylinux_2_31"
    )
    command = ["uv", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), requirement]
    versions = ["--python-version", "3.12", "--python-platform", platform]
    subprocess.run([*command, *versions], check=True, timeout=1800)
    return folder


def facts_in(root: Path, *, distribution: str) -> Facts:
    """Arguments and used names of one unpacked wheel."""
    source = Source(root)
    package = distribution.removesuffix("-cpu").replace("-", "_")
    module, classes = ARGUMENTS
    names = {
        name: source.signature(name)
        for name in used_names()
        if name.split(":")[0].split(".")[0] == package
    }
    arguments: dict[str, str | None] = {
        name: ""
        for owner in classes
        for name in sorted(source.fields(f"{module}:{owner}"))
        if package == "vllm" and not name.startswith("_")
    }
    return {"arguments": arguments, "names": names}


def used_names() -> list[str]:
    """What the package imports of vLLM, and the members that it uses, as module:name.member."""
    imported = {
        f"{node.module}:{alias.name}"
        for file in PACKAGE.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm"
        for alias in node.names
    }
    members = {
        f"{owner}.{member}" for owner, listed in MEMBERS.items() for member in listed.split()
    }
    return sorted(imported | set(MEMBERS) | members)


@dataclass(frozen=True)
class Source:
    """The source text below one folder."""

    root: Path

    def signature(self, name: str) -> str | None:
        """Parameters of a function, "" for anything else, None if there is no such name."""
        module, _, qualified = name.partition(":")
        owner, _, member = qualified.partition(".")
        node = self.find(module, owner)
        if node is None:
            return None
        if isinstance(node, ast.ClassDef) and member:
            found = members(node).get(member)
            return None if found is None else parameters(found)
        return parameters(node)

    def fields(self, name: str) -> set[str]:
        """Annotated fields of a class; none if it is not there."""
        node = self.find(*name.split(":"))
        if not isinstance(node, ast.ClassDef):
            return set()
        return {
            statement.target.id
            for statement in node.body
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
        }

    def find(self, module: str, name: str) -> ast.AST | None:
        """Where a name is defined, through any number of imports."""
        tree = self.tree(module)
        if tree is None:
            return None
        if self.tree(f"{module}.{name}") is not None:
            return ast.Module(body=[], type_ignores=[])
        for node in top_level(tree.body):
            if defines(node, name):
                return node
            elsewhere = self.imported(module, node, name)
            if elsewhere is not None:
                return self.find(*elsewhere)
        return None

    def imported(self, module: str, node: ast.stmt, name: str) -> tuple[str, str] | None:
        """Module and name that a statement takes a name from."""
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return self.absolute(module, node), alias.name
        # vllm/__init__.py: names that are loaded when asked for, as "name": ".module:name"
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
            for value in node.value.values:
                if isinstance(value, ast.Constant) and str(value.value).endswith(f":{name}"):
                    return module + str(value.value).split(":")[0], name
        return None

    @lru_cache  # noqa: B019  (one source lives as long as the program reads it)
    def tree(self, module: str) -> ast.Module | None:
        """Syntax tree of a module, None if there is none."""
        path = self.root / module.replace(".", "/")
        for file in (path / "__init__.py", path.with_name(path.name + ".py")):
            if file.is_file():
                return ast.parse(file.read_text(encoding="utf-8"))
        return None

    def absolute(self, module: str, node: ast.ImportFrom) -> str:
        """The module that an import statement names."""
        if node.level == 0:
            return node.module or ""
        path = self.root / module.replace(".", "/")
        parts = module.split(".")
        drop = node.level - 1 if path.is_dir() else node.level
        return ".".join([*parts[: len(parts) - drop], *filter(None, [node.module])])


def top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module, those under a condition included."""
    for node in body:
        yield node
        if isinstance(node, ast.If):
            yield from top_level([*node.body, *node.orelse])


def defines(node: ast.AST, name: str) -> bool:
    """Whether a statement binds a name other than by an import."""
    match node:
        case (
            ast.ClassDef(name=found)
            | ast.FunctionDef(name=found)
            | ast.AsyncFunctionDef(name=found)
        ):
            return found == name
        case ast.AnnAssign(target=ast.Name(id=found)):
            return found == name
        case ast.Assign(targets=targets):
            return any(isinstance(target, ast.Name) and target.id == name for target in targets)
    return False


def members(node: ast.ClassDef) -> dict[str, ast.AST]:
    """Methods, fields, and attributes that any method sets."""
    found: dict[str, ast.AST] = {}
    for inner in ast.walk(node):
        match inner:
            case ast.Attribute(value=ast.Name(id="self"), attr=attribute, ctx=ast.Store()):
                found.setdefault(attribute, inner)
    for statement in node.body:
        match statement:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found[name] = statement
            case ast.AnnAssign(target=ast.Name(id=name)):
                found[name] = statement
            case ast.Assign(targets=[ast.Name(id=name)]):
                found[name] = statement
    return found


def parameters(node: ast.AST) -> str:
    """Parameter names of a function, keyword-only ones behind a star."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return ""
    positional = [argument.arg for argument in [*node.args.posonlyargs, *node.args.args]]
    keyword = [argument.arg for argument in node.args.kwonlyargs]
    names = [name for name in positional if name not in {"self", "cls"}]
    return " ".join([*names, *(["*", *keyword] if keyword else [])])


def compare(known: Facts, found: Facts) -> list[str]:
    """What differs, in words."""
    differences: list[str] = []
    for table, now in found.items():
        before = known.get(table, {})
        for name in sorted(now | before):
            if name not in before:
                differences.append(f"{table}: {name!r} is new")
            elif name not in now:
                differences.append(f"{table}: {name!r} is gone")
            elif before[name] != now[name]:
                differences.append(f"{table}: {name!r} was {before[name]!r}, is {now[name]!r}")
    return differences


def read_facts() -> dict[str, Facts]:
    """The committed facts, by wheel."""
    if not FACTS.exists():
        return {}
    content = json.loads(FACTS.read_text(encoding="utf-8"))
    wheels: dict[str, Facts] = {
        wheel: {"arguments": {}, "names": {}} for wheel in content["wheels"]
    }
    for name, where in content["arguments"].items():
        for wheel in where:
            wheels[content["wheels"][wheel]]["arguments"][name] = ""
    for name, signatures in content["names"].items():
        for signature, where in signatures:
            for wheel in where:
                wheels[content["wheels"][wheel]]["names"][name] = signature
    return wheels


def write_facts(facts: dict[str, Facts]) -> None:
    """Keep the facts, each name once: beside it the numbers of the wheels that hold it."""
    wheels = sorted(facts, key=lambda wheel: (wheel.split()[0], wheel.split()[1].split(".")))
    arguments: dict[str, list[int]] = {}
    names: dict[str, list[tuple[str | None, list[int]]]] = {}
    for number, wheel in enumerate(wheels):
        for name in facts[wheel]["arguments"]:
            arguments.setdefault(name, []).append(number)
        for name, signature in facts[wheel]["names"].items():
            entries = names.setdefault(name, [])
            for known, where in entries:
                if known == signature:
                    where.append(number)
                    break
            else:
                entries.append((signature, [number]))
    rows = [
        f'"source": {json.dumps(SOURCE)}',
        f'"wheels": {json.dumps(wheels)}',
        '"arguments": {\n' + _lines(dict(sorted(arguments.items()))) + "\n}",
        '"names": {\n' + _lines(dict(sorted(names.items()))) + "\n}",
    ]
    FACTS.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")


def _lines(table: dict[str, object]) -> str:
    return ",\n".join(f" {json.dumps(name)}: {json.dumps(value)}" for name, value in table.items())


if __name__ == "__main__":
    raise SystemExit(main())
