"""Visible-device variables."""

import pytest

from device_env import VisibleDevicesError, logical_index, visible_devices


def test_rocr_and_hip_together_are_accepted_with_a_note() -> None:
    """HIP counts within ROCR: index 1 of GPUs 4 and 6 is GPU 6 (case A40)."""
    visible = visible_devices("rocm", {"ROCR_VISIBLE_DEVICES": "4,6", "HIP_VISIBLE_DEVICES": "1"})
    assert visible.variable == "HIP_VISIBLE_DEVICES"
    assert visible.ids == ("6",)
    (note,) = visible.notes
    assert "HIP_VISIBLE_DEVICES counts within what ROCR_VISIBLE_DEVICES leaves" in note


def test_cuda_alone_counts_on_rocm() -> None:
    """HIP reads CUDA_VISIBLE_DEVICES when its own is unset (case A40)."""
    visible = visible_devices("rocm", {"CUDA_VISIBLE_DEVICES": "2,3"})
    assert (visible.variable, visible.ids) == ("CUDA_VISIBLE_DEVICES", ("2", "3"))
    assert visible.notes == ()


def test_cuda_and_hip_that_differ_are_an_error() -> None:
    """Two answers to one question are refused, with both values (case A40)."""
    environ = {"CUDA_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "1"}
    with pytest.raises(
        VisibleDevicesError,
        match=r"HIP_VISIBLE_DEVICES='1' and CUDA_VISIBLE_DEVICES='0' choose different GPUs",
    ):
        visible_devices("rocm", environ)


def test_cuda_and_hip_that_agree_are_accepted() -> None:
    """The same choice written twice is one choice."""
    environ = {"CUDA_VISIBLE_DEVICES": "0,1", "HIP_VISIBLE_DEVICES": "0, 1"}
    assert visible_devices("rocm", environ).ids == ("0", "1")


def test_hip_cannot_reach_beyond_rocr() -> None:
    """An index beyond what ROCR leaves is refused."""
    environ = {"ROCR_VISIBLE_DEVICES": "0,1", "HIP_VISIBLE_DEVICES": "2"}
    with pytest.raises(VisibleDevicesError, match=r"asks for device 2, but .* leaves only 2"):
        visible_devices("rocm", environ)


def test_hip_does_not_matter_to_cuda() -> None:
    """Each kind reads its own variable only."""
    assert visible_devices("cuda", {"HIP_VISIBLE_DEVICES": "1"}).ids is None


def test_physical_id_5_of_4_to_7_is_logical_1() -> None:
    """ASCEND_RT_VISIBLE_DEVICES=4,5,6,7 puts physical NPU 5 at logical index 1 (case A40)."""
    visible = visible_devices("npu", {"ASCEND_RT_VISIBLE_DEVICES": "4,5,6,7"})
    assert logical_index(visible, "5") == 1


def test_ids_are_opaque() -> None:
    """UUIDs of GPUs and MIG slices are looked up as they are."""
    visible = visible_devices("cuda", {"CUDA_VISIBLE_DEVICES": "GPU-8932f937,MIG-6a7c,3"})
    assert visible.ids == ("GPU-8932f937", "MIG-6a7c", "3")
    assert logical_index(visible, "MIG-6a7c") == 1


@pytest.mark.parametrize(
    ("value", "ids"), [("", ()), ("-1", ()), ("0,-1,1", ("0",)), (" 2 , 0 ", ("2", "0"))]
)
def test_empty_and_minus_one_hide(value: str, ids: tuple[str, ...]) -> None:
    """An empty list hides all, and -1 hides itself and all that follow."""
    assert visible_devices("cuda", {"CUDA_VISIBLE_DEVICES": value}).ids == ids


def test_without_a_choice_logical_is_physical() -> None:
    """With the variable unset an index is its own logical index, and a UUID is refused."""
    visible = visible_devices("cuda", {})
    assert logical_index(visible, "3") == 3
    with pytest.raises(VisibleDevicesError, match=r"'GPU-1' is not an index, and CUDA_VISIBLE"):
        logical_index(visible, "GPU-1")


def test_invisible_id_is_refused() -> None:
    """An id that the process does not see is refused with what it sees."""
    visible = visible_devices("cuda", {"CUDA_VISIBLE_DEVICES": "4,5"})
    with pytest.raises(VisibleDevicesError, match=r"'0' is not visible: .* shows 4,5"):
        logical_index(visible, "0")


def test_device_listed_twice_is_refused() -> None:
    """CUDA takes no list with duplicates."""
    with pytest.raises(VisibleDevicesError, match=r"'0,1,0' lists '0' twice"):
        visible_devices("cuda", {"CUDA_VISIBLE_DEVICES": "0,1,0"})
