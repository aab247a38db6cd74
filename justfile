# `./run just check` on a laptop is what CI does; every other word is a part of it.

check: lint types imports wheels docs test eight-bit

# formatting, rules, the lock
lint:
    ruff format --check .
    ruff check .
    uv lock --check

# the one gate for types; package by package, since two may have a test of the same name
types:
    for part in packages/* "tools tests benchmarks examples conftest.py"; do mypy $part || exit 1; done

# who may import whom
imports:
    lint-imports

# every wheel built, installed alone and imported
wheels:
    python tools/check_wheels.py

# the documentation as a site, in site/; a broken link is an error
docs:
    zensical build --strict

# README and documentation examples included; needs no accelerator
test *args:
    pytest {{args}}

# with torchao, which would slow down and warn at every other start if it were installed
eight-bit *args:
    uv run --no-sync --with 'torchao>=0.18,<0.19' pytest packages/engine-fsdp/tests/test_eight_bit.py {{args}}

# what a change to one package needs: the tests that take seconds
quick *args:
    pytest -m "not slow" {{args}}
