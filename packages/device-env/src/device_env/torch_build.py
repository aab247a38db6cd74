"""Importing torch for detection, with the reasons why it may fail."""

from types import ModuleType

import attrs


@attrs.frozen
class TorchUnavailable:
    """Torch cannot be imported in this process."""

    reason: str
    """The error and what to do."""

    broken: bool
    """True when torch is installed and its import fails; False when it is not installed."""


def import_torch() -> ModuleType | TorchUnavailable:
    """Import torch, or say why that is impossible.

    Since torch 2.5 `import torch` loads every installed backend extension, so that a
    torch_npu without its CANN libraries breaks torch itself (torch/__init__.py,
    `_import_device_backends`); that is told apart here.
    """
    try:
        import torch  # noqa: PLC0415 - heavy, and optional
    except ModuleNotFoundError as error:
        if error.name == "torch":
            return TorchUnavailable("torch is not installed", broken=False)
        return TorchUnavailable(f"torch cannot be imported: {error}", broken=True)
    except (ImportError, OSError, RuntimeError) as error:
        cause = f" ({error.__cause__})" if error.__cause__ is not None else ""
        return TorchUnavailable(f"torch cannot be imported: {error}{cause}", broken=True)
    return torch
