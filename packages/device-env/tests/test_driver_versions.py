"""Versions in the files of the vendors."""

from pathlib import Path

from device_env.driver_versions import amd_driver, ascend_driver, cann_toolkit, nvidia_driver


def test_versions_are_found_in_the_vendors_files(tmp_path: Path) -> None:
    """Each vendor's form is read, the open and the closed NVIDIA module alike."""
    file = tmp_path / "version"
    file.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\n"
        "GCC version:  gcc version 12.2.0\n"
    )
    assert nvidia_driver(file) == "580.159.04"
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54  Tue Jun 6\n")
    assert nvidia_driver(file) == "535.54"
    file.write_text("6.12.12\n")
    assert amd_driver(file) == "6.12.12"
    file.write_text("package_version=25.2.0\nVersion=25.2.0\n")
    assert ascend_driver(file) == "25.2.0"


def test_cann_is_the_one_that_the_environment_points_to(tmp_path: Path) -> None:
    """Its version is in the installation note of the architecture."""
    folder = tmp_path / "aarch64-linux"
    folder.mkdir()
    (folder / "ascend_toolkit_install.info").write_text("package_name=x\nversion=8.5.0\n")
    assert cann_toolkit({"ASCEND_HOME_PATH": str(tmp_path)}) == "8.5.0"
    assert cann_toolkit({}) is None


def test_a_file_that_is_not_there_gives_none(tmp_path: Path) -> None:
    """Unknown is None, not a guess."""
    assert nvidia_driver(tmp_path / "none") is None
    (tmp_path / "odd").write_text("something else\n")
    assert nvidia_driver(tmp_path / "odd") is None
