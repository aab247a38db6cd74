"""Importing torch for detection, with the reasons why it may fail."""

import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from types import ModuleType

import attrs

_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"

VENDOR_ERRORS = (
    ImportError,
    OSError,
    RuntimeError,
    AttributeError,
    AssertionError,
    TypeError,
    ValueError,
)
"""What a vendor's package raises where its libraries, driver or torch do not fit it."""


@attrs.frozen
class TorchUnavailable:
    """Torch cannot be imported in this process."""

    reason: str
    """The error and what to do."""

    broken: bool
    """True when torch is installed and its import fails; False when it is not installed."""


def import_torch() -> ModuleType | TorchUnavailable:
    """Import torch, or say why that is impossible.

    Since torch 2.5 `import torch` loads every installed backend extension
    (torch/__init__.py, `_import_device_backends`), so that a torch_npu without its CANN
    libraries breaks torch itself; a second attempt in the same process then ends in another
    error and crashes the interpreter at its end (seen with torch 2.10.0 and torch_npu 2.10.0).
    So torch is imported without its extensions here, and detection imports those it asks for.
    """
    if "torch" in sys.modules:
        return sys.modules["torch"]
    try:
        with without_extensions():
            return importlib.import_module("torch")
    except ModuleNotFoundError as error:
        if error.name == "torch":
            return TorchUnavailable("torch is not installed", broken=False)
        return TorchUnavailable(f"torch cannot be imported: {error}", broken=True)
    except VENDOR_ERRORS as error:
        return TorchUnavailable(f"torch cannot be imported: {error}", broken=True)


def broken_extensions(environ: Mapping[str, str]) -> dict[str, str]:
    """Installed backend extensions that make `import torch` fail, with the error of each.

    Empty where the environment keeps torch from loading them.
    """
    if environ.get(_AUTOLOAD) == "0":
        return {}
    broken: dict[str, str] = {}
    for extension in metadata.entry_points(group="torch.backends"):
        try:
            importlib.import_module(extension.module)
        except VENDOR_ERRORS as error:
            broken[extension.name] = str(error)
    return broken


@contextmanager
def without_extensions() -> Iterator[None]:
    """Keep `import torch` from loading extensions, and the environment as it was.

    torch_npu sets the same variable when it is imported, and leaves it set when that fails.
    """
    before = os.environ.get(_AUTOLOAD)
    os.environ[_AUTOLOAD] = "0"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_AUTOLOAD, None)
        else:
            os.environ[_AUTOLOAD] = before
