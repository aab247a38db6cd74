"""What must hold for the repository as a whole."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
IMPORT_NAMES = [path.name.replace("-", "_") for path in PACKAGES]


def tracked_files() -> list[Path]:
    """The files that git knows of, or would."""
    done = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return [path for line in done.stdout.splitlines() if (path := ROOT / line).is_file()]


def loaded_after(statement: str) -> set[str]:
    """Names of the modules that a fresh process has loaded after a statement."""
    done = subprocess.run(
        [sys.executable, "-c", f"{statement}; import sys; print(*sys.modules)"],
        check=True,
        capture_output=True,
        text=True,
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("package", "heavy"),
    [
        ("async_policy", {"torch", "ray", "vllm"}),
        ("device_env", {"torch", "torch_npu", "vllm", "ray"}),
        ("parallel_state", {"torch"}),
        ("rl_contracts", {"torch"}),
        ("rl_metrics", {"torch", "matplotlib"}),
        ("rl_tasks", {"torch", "pyarrow", "transformers"}),
        ("rollout_vllm", {"torch", "vllm"}),
        ("engine_veomni", {"veomni"}),
        ("engine_fsdp", {"veomni", "vllm", "ray"}),
        ("algos_gspo_dapo_grpo", {"transformers", "vllm", "ray"}),
    ],
)
def test_imports_are_light(package: str, heavy: set[str]) -> None:
    """Importing a package loads none of the heavy libraries that it uses later or not at all."""
    assert not heavy & loaded_after(f"import {package}")


def test_the_import_check_can_fail() -> None:
    """The check above does see what an import loads."""
    assert "torch" in loaded_after("import rl_contracts.train")


@pytest.mark.parametrize("folder", PACKAGES, ids=lambda path: path.name)
def test_public_names_are_listed(folder: Path) -> None:
    """`__all__` is sorted as ruff sorts it, complete, and everything in it exists."""
    init = folder / "src" / folder.name.replace("-", "_") / "__init__.py"
    tree = ast.parse(init.read_text(encoding="utf-8"))
    imported = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    (listed,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id == "__all__"
    )
    assert set(listed) == imported
    assert len(listed) == len(set(listed))


@pytest.mark.parametrize("folder", PACKAGES, ids=lambda path: path.name)
def test_every_package_has_its_parts(folder: Path) -> None:
    """README with an example, changelog and fragment, types marker, ranges between ours."""
    import_name = folder.name.replace("-", "_")
    assert (folder / "src" / import_name / "py.typed").is_file()
    assert "```python" in (folder / "README.md").read_text(encoding="utf-8")
    assert (folder / "CHANGELOG.md").is_file()
    assert list((folder / "changelog.d").glob("*.*.md"))
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    ours = {path.name for path in PACKAGES}
    requirements = [
        *project["dependencies"],
        *(r for extra in project.get("optional-dependencies", {}).values() for r in extra),
    ]
    for requirement in requirements:
        name = re.split(r"[\[<>=~! ]", requirement, maxsplit=1)[0]
        if name in ours:
            assert re.search(r">=\d.*,<\d", requirement), requirement


def words_of_the_tree(readme: str) -> Iterator[str]:
    """File and folder names in the README's tree."""
    tree = readme.split("## The tree")[1].split("```")[1]
    for line in tree.splitlines():
        if line.strip():
            yield line.split()[0].rstrip("/")


def test_the_readme_tree_is_complete() -> None:
    """The README's tree names every entry of the root and every example, and nothing else."""
    files = tracked_files()
    top = {path.relative_to(ROOT).parts[0] for path in files}
    examples = {
        path.relative_to(ROOT / "examples").parts[0]
        for path in files
        if path.is_relative_to(ROOT / "examples")
    }
    test_folders = {
        path.relative_to(ROOT).parts[1]
        for path in files
        if path.is_relative_to(ROOT / "tests") and len(path.relative_to(ROOT).parts) > 2
    }
    hidden = {name for name in top if name.startswith(".")} | {"README.md"}
    named = set(words_of_the_tree((ROOT / "README.md").read_text(encoding="utf-8")))
    assert named == (top - hidden) | examples | test_folders


def test_no_registry_host_is_written_by_hand() -> None:
    """Only the lock file, which uv writes, holds the name of a package registry's host."""
    hosts = re.compile(
        r"pypi\.(org|python)|pythonhosted|registry\.npmjs|files\.pyth", re.IGNORECASE
    )
    found = [
        str(path.relative_to(ROOT))
        for path in tracked_files()
        if path.name != "uv.lock"
        and path != Path(__file__)
        and hosts.search(path.read_text(encoding="utf-8", errors="ignore"))
    ]
    assert found == []


def test_old_logprobs_are_not_named() -> None:
    """A logprob is named after the policy that produced it (docs/adr/0004)."""
    banned = re.compile(r"\bold_(policy_)?log_?p", re.IGNORECASE)
    found = [
        str(path.relative_to(ROOT))
        for path in tracked_files()
        if path.suffix == ".py"
        and path != Path(__file__)
        and banned.search(path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_the_capability_table_is_what_the_packages_say() -> None:
    """docs/capabilities.md is the output of its tool."""
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "print_capabilities.py"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert (ROOT / "docs" / "capabilities.md").read_text(encoding="utf-8") == done.stdout


def test_the_wheel_tag_is_mended() -> None:
    """A wheel that says it is for another Python says the right one afterwards."""
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        from mend_wheel_tag import mended  # noqa: PLC0415
    finally:
        sys.path.pop(0)
    text = "Wheel-Version: 1.0\nTag: cp312-cp312-linux_x86_64\n"
    assert mended(text, interpreter="cp311") == (
        "Wheel-Version: 1.0\nTag: cp311-cp311-linux_x86_64\n"
    )
