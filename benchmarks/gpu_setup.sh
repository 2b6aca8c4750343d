#!/bin/bash
# Puts packed wheels into /tmp/site, on a machine that has PyTorch and no package index: source benchmarks/gpu_setup.sh
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .gpu/*.whl $(ls .whl/*.whl 2>/dev/null)
tar xJf .gpu/vllm-*.tar.xz -C /tmp/site
export PYTHONPATH=/tmp/site:$PWD VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_USE_DEEP_GEMM=0 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 HF_HUB_OFFLINE=1
