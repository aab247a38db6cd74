"""`python -m device_env` is the command `device-env`."""

from device_env.cli import main

raise SystemExit(main())
