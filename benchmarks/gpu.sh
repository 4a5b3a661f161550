#!/usr/bin/env bash
# Correctness, kernels, and training of GLM-4-9B-0414 at full size (random weights) on a GPU, beside the stock way.
# Needs this checkout and a Python with torch, transformers and safetensors; nothing is installed or fetched.
#   benchmarks/gpu.sh                     writes $OUT/gpu.jsonl and a page (default benchmarks/results)
#   benchmarks/gpu.sh --seconds 590 PART  some parts of it, added to what is there (--help names them)
#   benchmarks/gpu.sh --tiny              the same at tiny size on the CPU
set -eu
cd "$(dirname "$0")/.."
PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH} exec "${PYTHON:-python3}" -m benchmarks.gpu.run \
  --out "${OUT:-benchmarks/results}" "$@"
