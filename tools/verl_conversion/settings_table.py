"""Print data/settings.tsv from verl's published wheels, with hydra itself.

    pip download --no-deps verl==0.9.1                                  # one wheel for each release
    uv run --no-project --with hydra-core==1.3.8 \
        tools/verl_conversion/settings_table.py verl-*.whl > tools/verl_conversion/data/settings.tsv

Run in an environment of its own, since hydra needs an antlr4 runtime that math-verify excludes.
Only the wheels' YAML is read. A release that is added here is added to `Release` in releases.py
too, and each fact in readers.py is looked up in it.
"""

import json
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir  # type: ignore[import-not-found]
from hydra.core.global_hydra import GlobalHydra  # type: ignore[import-not-found]
from omegaconf import DictConfig, OmegaConf  # type: ignore[import-not-found]
from omegaconf.errors import OmegaConfBaseException  # type: ignore[import-not-found]

CONFIG = "verl/trainer/config"
ASYNC = "verl/experimental/fully_async_policy/config/fully_async_ppo_trainer.yaml"
VARIANTS = ("main_ppo/dp", "main_ppo/veomni", "fully_async/dp", "fully_async/veomni")
HEADING = """\
# Settings of verl: key, default, where.
# Composed with hydra 1.3.8 from the configuration files of verl's published wheels, with and
# without model_engine=veomni; `_target_` keys are left out. Where: a release (all of main_ppo and
# fully_async with dp and veomni), or release/program/engine."""


def leaves(node: DictConfig, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Every setting with its value; an interpolation that needs more than this stays as written."""
    for name in node:
        path = f"{prefix}{name}"
        if OmegaConf.is_missing(node, name):
            yield path, "???"
            continue
        try:
            value: Any = node[name]
        except OmegaConfBaseException:
            yield path, OmegaConf.to_container(node, resolve=False)[name]
            continue
        if OmegaConf.is_dict(value) and len(value):
            yield from leaves(value, f"{path}.")
        else:
            yield path, OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def settings(wheel: Path, variant: str) -> dict[str, str]:
    """The settings of one program with one engine, as JSON texts."""
    program, _, engine = variant.partition("/")
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith(".yaml") and name.startswith(CONFIG):
                archive.extract(name, folder)
        config = Path(folder) / CONFIG
        if program == "fully_async":
            text = archive.read(ASYNC).decode()
            body = text[text.index("defaults:") :]  # without the search path: all is here
            (config / "fully_async.yaml").write_text(body, encoding="utf-8")
        GlobalHydra.instance().clear()
        with initialize_config_dir(str(config), version_base=None):
            name = "fully_async" if program == "fully_async" else "ppo_trainer"
            composed = compose(name, overrides=[f"model_engine={engine}"])
            return {
                path: json.dumps(value, sort_keys=True)
                for path, value in leaves(composed)
                if path.rpartition(".")[2] != "_target_"
            }


def main(wheels: Sequence[str]) -> None:
    """Print the table of these wheels."""
    rows: dict[tuple[str, str], set[str]] = {}
    releases = sorted(Path(wheel).name.split("-")[1] for wheel in wheels)
    for wheel in wheels:
        release = Path(wheel).name.split("-")[1]
        for variant in VARIANTS:
            for path, value in settings(Path(wheel), variant).items():
                rows.setdefault((path, value), set()).add(f"{release}/{variant}")
    print(HEADING)
    for (path, value), places in sorted(rows.items()):
        where: list[str] = []
        for release in releases:
            here = [f"{release}/{v}" for v in VARIANTS if f"{release}/{v}" in places]
            where += [release] if len(here) == len(VARIANTS) else here
        print(path, value, "*" if where == releases else " ".join(where), sep="\t")


if __name__ == "__main__":
    main(sys.argv[1:])
