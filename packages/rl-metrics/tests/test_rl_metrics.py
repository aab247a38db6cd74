"""The package as a whole."""

import subprocess
import sys


def test_importing_it_loads_no_vendor() -> None:
    """Neither torch nor matplotlib nor a tracker is loaded before it is used."""
    program = (
        "import sys, rl_metrics;"
        "vendors = ('torch', 'matplotlib', 'numpy', 'ray', 'vllm',"
        " 'tensorboard', 'wandb', 'mlflow', 'trackio');"
        "print([name for name in vendors if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout == "[]\n"
