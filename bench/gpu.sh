#!/usr/bin/env bash
# Build, prove and time the CUDA kernels on this machine's GPU, in one command of under 8 minutes:
#   bench/gpu.sh [RESULT.json]        PYTHON=.venv/bin/python bench/gpu.sh
# Status 2 and one line where something is missing, 1 when something is wrong.
set -euo pipefail
cd "$(dirname "$0")/.."
missing() {
  echo "gpu: $1" >&2
  exit 2
}
nvidia-smi -L 2>/dev/null | grep -q '^GPU' || missing "no GPU: nvidia-smi is missing or lists none"
python=${PYTHON:-python3}
command -v "$python" >/dev/null || missing "no $python: set PYTHON"
exec "$python" bench/gpu_steps.py "$@"
