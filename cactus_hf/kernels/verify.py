"""`verify_block` in Triton: two passes over the logits, with the rule's own functions in between.

The rows at drafted positions are read once, for their normalisers; after the accept scan, of each sequence one row of
the target and one of the draft, for the next token. Nothing waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..acceptance import AcceptanceRule
from ..verification import Normaliser, Verification
from .draws import draw_next
from .normalise import Block, read_block
from .scan import scan
from .tiles import TILE


def verify_block(
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor | None,
    rule: AcceptanceRule,
    draft_lengths: Tensor,
    uniforms: Tensor,
    draft_normaliser: Normaliser | None = None,
    tile: int = TILE,
) -> Verification:
    """
    As [`cactus_hf.verification.verify_block`], for logits of any strides in bfloat16, float16 or float32.

    Kept counts are the reference's for the same uniforms, and so is the next token but for a uniform at a boundary
    between two tokens within rounding. One case differs: a row behind the drafts that holds NaN or +inf is reported
    only if it is reached, as it is not read otherwise.
    """
    tokens, uniforms = draft_tokens.contiguous(), uniforms.contiguous()
    given = None if draft_logits is None else draft_normaliser
    with torch.cuda.device_of(target_logits):  # Triton launches on the current device
        block = read_block(target_logits, tokens, draft_logits, rule, draft_lengths, given, tile)
        result = scan(block, rule, draft_lengths, uniforms)
        draw_next(target_logits, tokens, draft_logits, rule, uniforms, block, result, tile)
    return result
