"""Compare device-env's registry with the variables that published wheels really read.

    uv run tools/check_env_registry.py vllm==0.23.0 vllm-ascend==0.23.0
    uv run tools/check_env_registry.py vllm==0.33.0 --write

Each wheel is downloaded into a temporary folder (hundreds of megabytes for vllm), without its
dependencies, and only its `envs.py` is read; nothing is installed or executed.
A path to a wheel stands for a download. With `--write` the names are kept in
`device_env/data/names`, where the package and its tests find them. The exit status is 1 when
the registry says of a variable what the wheel contradicts, and 2 when a wheel cannot be read.
"""

import argparse
import json
import subprocess
import tempfile
import zipfile
from pathlib import Path

from packaging.utils import parse_wheel_filename
from packaging.version import Version

from device_env import Registry, names_read_by_vllm

NAMES = Path("packages/device-env/src/device_env/data/names")
TABLES = {
    "vllm": ("vllm/envs.py", "environment_variables"),
    "vllm-ascend": ("vllm_ascend/envs.py", "env_variables"),
}


def main() -> int:
    """Look at every wheel that is named; 1 when one of them contradicts the registry."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("wheels", nargs="+", metavar="NAME==VERSION|FILE.whl")
    parser.add_argument("--write", action="store_true", help="keep the names in the package")
    arguments = parser.parse_args()
    registry = Registry.load()
    wrong = 0
    for wanted in arguments.wheels:
        with tempfile.TemporaryDirectory() as folder:
            wheel = Path(wanted) if wanted.endswith(".whl") else download(wanted, Path(folder))
            try:
                distribution, version, names = names_in(wheel)
            except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
                parser.error(f"{wanted}: {error}")
        contradictions = compare(distribution, version, names)
        beyond = sum(name not in registry for name in names)
        print(
            f"{distribution} {version}: {len(names)} names, {beyond} of them not in the registry, "
            f"{len(contradictions)} contradictions"
        )
        for text in contradictions:
            print(f"  {text}")
        wrong += len(contradictions)
        if arguments.write:
            write(distribution, version, names)
    return 1 if wrong else 0


def download(requirement: str, folder: Path) -> Path:
    """One wheel, without its dependencies."""
    pip = ["uv", "tool", "run", "pip"]  # the workspace's environment has none
    command = [*pip, "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*command, "--dest", str(folder), requirement], check=True, timeout=1800)
    (wheel,) = folder.glob("*.whl")
    return wheel


def names_in(wheel: Path) -> tuple[str, Version, frozenset[str]]:
    """Distribution, version and the names of its table of variables."""
    distribution, version, _, _ = parse_wheel_filename(wheel.name)
    if distribution not in TABLES:
        wanted = " or ".join(TABLES)
        raise ValueError(f"expected a wheel of {wanted}, got {distribution} {version}")
    path, table = TABLES[distribution]
    with zipfile.ZipFile(wheel) as archive:
        source = archive.read(path).decode("utf-8")
    return distribution, version, names_read_by_vllm(source, table=table)


def compare(distribution: str, version: Version, names: frozenset[str]) -> list[str]:
    """What the registry says of this version that its wheel contradicts."""
    found: list[str] = []
    for variable in Registry.load():
        if variable.reader != distribution:
            continue
        reading = variable.reading(version)
        true = "read" if variable.name in names else "not read"
        if reading not in {"unknown", true}:
            found.append(f"{variable.name}: the registry says {reading}, the wheel says {true}")
    return found


def write(distribution: str, version: Version, names: frozenset[str]) -> None:
    """Add this version to the package's file of names."""
    file = NAMES / f"{distribution}.json"
    table = json.loads(file.read_text()) if file.exists() else {"versions": [], "names": {}}
    reading = {
        known: {name for name, read in table["names"].items() if read[index] == "1"}
        for index, known in enumerate(table["versions"])
    }
    reading[version.public] = set(names)
    versions = sorted(reading, key=Version)
    union = sorted(set().union(*reading.values()))
    rows = {name: "".join("01"[name in reading[known]] for known in versions) for name in union}
    path, dictionary = TABLES[distribution]
    source = f"keys of {dictionary} in {path} of the wheels {', '.join(versions)}"
    content = {"source": source, "versions": versions, "names": rows}
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
