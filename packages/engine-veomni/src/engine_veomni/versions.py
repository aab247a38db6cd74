"""Which releases of VeOmni this package was tested with, and what their parallel state looks like.

The shape of the state changed in 0.1.8, 0.1.9a3 and 0.1.12 (`ep_size`, then a tuple of extra
sizes that is stored as a dict, then a name and a returned state), each time without an error for
callers of the shape before. So a release is let in by name, after its tests passed.
"""

from importlib.metadata import PackageNotFoundError, version
from typing import Final

TESTED_VEOMNI: Final = ("0.1.12",)
"""Releases whose shape `veomni_state` speaks."""


def check_veomni_version(installed: str | None = None) -> str:
    """The installed release of VeOmni, if it is one of `TESTED_VEOMNI`.

    Args:
        installed: the release to check; None asks the environment.

    Raises:
        ValueError: if VeOmni is absent or another release.
    """
    if installed is None:
        try:
            installed = version("veomni")
        except PackageNotFoundError as error:
            message = (
                "engine-veomni: veomni is not installed; "
                f"install engine-veomni[veomni], which brings {TESTED_VEOMNI[-1]}"
            )
            raise ValueError(message) from error
    if installed not in TESTED_VEOMNI:
        message = (
            f"engine-veomni: expected veomni {' or '.join(TESTED_VEOMNI)}, got {installed}; its "
            "parallel state changes between releases without an error, so a release is used only "
            "after its tests passed: install engine-veomni[veomni]"
        )
        raise ValueError(message)
    return installed
