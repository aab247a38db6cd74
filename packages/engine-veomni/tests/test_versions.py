"""Releases of VeOmni are let in by name."""

import pytest

from engine_veomni import TESTED_VEOMNI, check_veomni_version


def test_the_installed_release_was_tested() -> None:
    """The lock file and the table agree."""
    assert check_veomni_version() in TESTED_VEOMNI


@pytest.mark.parametrize("release", ["0.1.11", "0.1.13", "0.1.12.post1"])
def test_another_release_is_refused(release: str) -> None:
    """0.1.11, for one, overcounts the gradient norm with replicas, without an error."""
    with pytest.raises(ValueError, match=rf"expected veomni 0\.1\.12, got {release}; .* install"):
        check_veomni_version(release)
