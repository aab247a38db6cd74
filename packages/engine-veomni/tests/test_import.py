"""Importing the package is light."""

import subprocess
import sys


def test_import_loads_no_vendor() -> None:
    """Neither VeOmni nor transformers is loaded before an engine is built."""
    code = (
        "import sys, engine_veomni; "
        "print(sorted(m for m in ('veomni', 'transformers', 'triton') if m in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "[]"
