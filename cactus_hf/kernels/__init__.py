"""Verification fused into a few Triton kernels, for CUDA: the same results as the reference in `verification.py`.

Triton is imported when [`verify_block`] first runs, never with the package.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..acceptance import AcceptanceRule


if TYPE_CHECKING:
    from ..verification import Verification

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def serves(target_logits: Tensor, draft_logits: Tensor | None, rule: AcceptanceRule) -> bool:
    """
    Whether [`verify_block`] of this package takes such a block; the reference takes every one.

    It does with Triton installed, for logits in bfloat16, float16 or float32 on a CUDA device of compute capability 8
    or more (which Triton asks for), and for rules that need no more of a row than its entropy and a token's rank.
    """
    if not target_logits.is_cuda or target_logits.dtype not in DTYPES:
        return False
    if draft_logits is not None and draft_logits.dtype not in DTYPES:
        return False
    return rule.needs <= {"entropy", "rank"} and _has_triton() and _is_recent(target_logits.device)


def verify_block(*block: Any) -> Verification:
    """As the function of this name in `verification.py`, for blocks that [`serves`] accepts."""
    from .verify import verify_block

    return verify_block(*block)


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def _is_recent(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)
