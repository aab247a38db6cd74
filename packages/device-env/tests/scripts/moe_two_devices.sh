#!/usr/bin/env bash
# One script for two kinds of device, told apart by a variable.
set -x
DEVICE=${DEVICE:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}
ARMS=2

case "${DEVICE}" in
    gpu)
        export NCCL_DEBUG=WARN
        ;;
    npu)
        export TASK_QUEUE_ENABLE=1
        export HCCL_OP_EXPANSION_MODE="AIV"
        export VLLM_USE_V1=1
        export VLLM_VERSION=0.13.0
        export VLLM_ASCEND_ENABLE_NZ=0
        export HCCL_BUFFSIZE=610
        export PYTORCH_NPU_ALLOC_CONF=max_split_size_mb:1024
        export CUDA_DEVICE_MAX_CONNECTIONS=1
        ;;
    *)
        echo "expected gpu or npu, got ${DEVICE}" >&2
        exit 1
        ;;
esac

if [ "${DEVICE}" = "npu" ]; then
    EXTRA=(+rollout.cudagraph_mode="FULL_DECODE_ONLY")
fi
python3 -m trainer "${EXTRA[@]:-}" arms=$ARMS
