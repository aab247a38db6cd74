#!/usr/bin/env bash
# The environment of a GSPO run on Ascend NPUs, as such scripts are found in public.
set -xeuo pipefail

export HYDRA_FULL_ERROR=1
export TASK_QUEUE_ENABLE=1
export HCCL_EXEC_TIMEOUT=3600
export HCCL_CONNECT_TIMEOUT=3600
export HCCL_ASYNC_ERROR_HANDLING=0
export CPU_AFFINITY_CONF=1
export VLLM_USE_V1=1
export VLLM_ATTENTION_BACKEND=XFORMERS
export VLLM_ASCEND_ENABLE_FLASHCOMM=1
export VLLM_ASCEND_ENABLE_PREFETCH_MLP=1
export VLLM_ASCEND_ENABLE_DENSE_OPTIMIZE=1
# export LD_PRELOAD=/usr/local/lib/libjemalloc.so.2

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-32B}
DATA_HOME=${DATA_HOME:-"${HOME}/data"}
SEQ_LEN=$((1024 * 2 + 1024 * 8))

DATA=(
    data.train_files="${DATA_HOME}/train.parquet"
    data.truncation='left'
)
ROLLOUT=(
    rollout.max_num_batched_tokens=${SEQ_LEN}
    +rollout.cudagraph_capture_sizes="[8, 16, 32]"
)

python3 -m trainer \
    "${DATA[@]}" \
    "${ROLLOUT[@]}" \
    model.path="${MODEL_PATH}" \
    "$@" | tee "logs/gspo.log"
