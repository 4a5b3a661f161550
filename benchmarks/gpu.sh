#!/usr/bin/env bash
# Parity with transformers and a few training steps of GLM-4-9B-0414 at full size (random weights) on a GPU.
# Needs this checkout and a Python with torch, transformers and safetensors; nothing is installed or fetched.
#   benchmarks/gpu.sh           writes $OUT/gpu.jsonl (default benchmarks/results)
#   benchmarks/gpu.sh --tiny    the same at tiny size on the CPU
set -eu
cd "$(dirname "$0")/.."
PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH} exec "${PYTHON:-python3}" -m benchmarks.gpu_check \
  --out "${OUT:-benchmarks/results}" "$@"
