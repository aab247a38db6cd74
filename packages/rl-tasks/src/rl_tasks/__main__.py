"""``python -m rl_tasks``."""

import sys

from rl_tasks.cli import main

if __name__ == "__main__":
    sys.exit(main())
