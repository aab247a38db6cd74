"""Visible devices as Ray itself sets and reads them for its workers (case A40)."""

import json
import subprocess
import sys

from device_env import check_environment, visible_devices

PROGRAM = """
import json, os
from ray._private.accelerators import amd_gpu, npu, nvidia_gpu
seen = {}
def attempt(environ, step):
    os.environ.clear()
    os.environ.update(environ)
    try:
        step()
    except Exception as error:
        return {"error": type(error).__name__}
    return dict(os.environ)
ids = ["5", "7"]
for name, manager in (
    ("cuda", nvidia_gpu.NvidiaGPUAcceleratorManager),
    ("npu", npu.NPUAcceleratorManager),
    ("rocm", amd_gpu.AMDGPUAcceleratorManager),
):
    give = lambda: manager.set_current_process_visible_accelerator_ids(ids)
    seen[name] = attempt({}, give)
rocm = amd_gpu.AMDGPUAcceleratorManager.get_visible_accelerator_ids_env_var
seen["rocr alone"] = attempt({"ROCR_VISIBLE_DEVICES": "4,6"}, rocm)
seen["rocr and hip"] = attempt({"ROCR_VISIBLE_DEVICES": "4,6", "HIP_VISIBLE_DEVICES": "1"}, rocm)
print(json.dumps(seen))
"""


def test_what_ray_sets_is_what_is_read() -> None:
    """The ids that Ray gives to a worker are the visible ones, for each kind of device.

    ROCR_VISIBLE_DEVICES alone makes Ray raise, which is an error here too; with HIP it is fine.
    """
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=120
    )
    seen = json.loads(done.stdout.splitlines()[-1])
    assert visible_devices("cuda", seen["cuda"]).ids == ("5", "7")
    assert visible_devices("npu", seen["npu"]).ids == ("5", "7")
    assert visible_devices("rocm", seen["rocm"]).ids == ("5", "7")
    ray = {"ray": "2.60.0"}
    alone = check_environment({"ROCR_VISIBLE_DEVICES": "4,6"}, ray, device_kind="rocm")
    assert [found.level for found in alone] == ["error"]
    assert "error" in seen["rocr alone"]
    assert "error" not in seen["rocr and hip"]
