#!/bin/bash
set -xeuo pipefail
source /usr/local/Ascend/ascend-toolkit/set_env.sh

export HCCL_CONNECT_TIMEOUT=1500
export HCCL_HOST_SOCKET_PORT_RANGE=60000-60050
export HCCL_NPU_SOCKET_PORT_RANGE=61000-61050
export RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES=1
export ASCEND_RT_VISIBLE_DEVICES=0,1,2,3,4,5,6,7
export DISABLE_L2_CACHE=1
export TASK_QUEUE_ENABLE=${TASK_QUEUE_ENABLE:-1}
export VLLM_ASCEND_ENABLE_NZ=0
export VLLM_ASCEND_ENABLE_FLASHCOMM1=${VLLM_ASCEND_ENABLE_FLASHCOMM1:-1}
export VLLM_ALLREDUCE_USE_SYMM_MEM=${VLLM_ALLREDUCE_USE_SYMM_MEM:-0}
export CPU_AFFINITY_CONF=${CPU_AFFINITY_CONF:-1}
export LD_PRELOAD="/usr/lib/libjemalloc.so.2${LD_PRELOAD:+:$LD_PRELOAD}"

STAMP=$(date +"%Y-%m-%d_%H-%M-%S")
LAUNCH=(python3)
if [ "${USE_UV:-1}" != 0 ]; then
    uv sync --frozen
    LAUNCH=(uv run --frozen python3)
fi
"${LAUNCH[@]}" -m trainer --stamp "$STAMP" "$@" 2>&1 | tee run.log
