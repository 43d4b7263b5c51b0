"""vLLM's Triton kernels on CPU tensors, in Triton's interpreter: importing this module prepares the process.

vLLM looks for Triton once, when it is first imported, and believes in backends that Triton does not come with.
Its other tests cannot run then. So these want a process of their own: `tests/vllm/run` gives them one, saying so by
`TRITON_INTERPRET`.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from types import SimpleNamespace

import pytest


# `vllm` alone is found without it as well: this folder, as the one above is on the path
if find_spec("vllm.v1") is None or os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs vLLM and a process of its own: tests/vllm/run", allow_module_level=True)

import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.backends import backends  # noqa: E402


# vLLM's CPU build asks for the first, others for one that is active and not the first
for name in ("cpu", "interpreter"):
    backends[name] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)

from vllm.v1.sample.ops import topk_topp_sampler  # noqa: E402
from vllm.v1.worker.gpu import buffer_utils  # noqa: E402
from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils  # noqa: E402


@triton.jit
def log1p(x):
    return tl.log(1.0 + x)


rejection_sampler_utils.tldevice = SimpleNamespace(log1p=log1p)  # the interpreter has none of libdevice
buffer_utils.is_uva_available = lambda: False  # nor has a CPU pinned memory
topk_topp_sampler.HAS_TRITON = False  # its kernel cannot be interpreted; this takes PyTorch's version
