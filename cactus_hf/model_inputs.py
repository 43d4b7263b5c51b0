"""What a model's forward pass is given besides token ids: made by `generate()` for the prompts, carried on by us."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


# One value a token of the prompts, carried on with ones, with the last value, or with zeros
MASKS = ("attention_mask", "decoder_attention_mask")
REPEATED = ("token_type_ids", "cross_attention_mask", "image_attention_mask")
ZEROED = ("mm_token_type_ids", "moe_mm_token_type_ids")
POSITIONS = ("position_ids", "decoder_position_ids")


def extended(inputs: dict[str, Any], num_columns: int, is_encoder_decoder: bool) -> dict[str, Any]:
    """The inputs of the prompts as they would be for texts of `num_columns` tokens, fewer or more.

    Args:
        inputs (`dict`): as `generate()` prepared them; of an encoder-decoder model `attention_mask` is the encoder's.
    """
    longer = dict(inputs)
    for name, value in inputs.items():
        if value is None or (is_encoder_decoder and name == "attention_mask"):
            continue
        if name in POSITIONS:
            value = value[..., :num_columns]
            missing = num_columns - value.shape[-1]
            ahead = torch.arange(1, missing + 1, device=value.device)
            longer[name] = torch.cat([value, value[..., -1:] + ahead], dim=-1)
        elif name in MASKS + REPEATED + ZEROED:
            value = value[:, :num_columns]
            last = value[:, -1:]
            if name not in REPEATED:
                last = torch.full_like(last, int(name in MASKS))
            repeats = [1, num_columns - value.shape[1], *[1] * (value.dim() - 2)]
            longer[name] = torch.cat([value, last.repeat(repeats)], dim=1)
    return longer


def position_offset(position_ids: Tensor | None, num_tokens: Tensor) -> Tensor | None:
    """How far positions run ahead of the count of tokens, as they do behind an image; `None`: nowhere.

    Args:
        position_ids (`torch.Tensor` of shape [R, P], [1, P] or [planes, R, P], *optional*): of the prompts. Models
            with several planes of positions count height, width and time apart.
        num_tokens (`torch.Tensor` of shape [R], on the CPU): tokens of each prompt.

    Returns:
        A tensor [R] or [planes, R] on the CPU.
    """
    if position_ids is None:
        return None
    offset = position_ids[..., -1].cpu() + 1 - num_tokens
    return offset if offset.any() or offset.dim() > 1 else None
