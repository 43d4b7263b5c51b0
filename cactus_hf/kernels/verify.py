"""`verify_block` in Triton: two passes over the logits, with the rule's own functions in between.

The rows at drafted positions are read once, for their normalisers; after the accept scan, of each sequence one row of
the target and one of the draft, for the next token. Nothing waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..acceptance import AcceptanceRule, Drafted
from ..probabilities import Normaliser, draw, row_probs
from ..verification import Verification, replacement
from .draws import draw_next
from .normalise import Block, read_block
from .scan import scan
from .tiles import TILE


Scales = tuple[Tensor | float, Tensor | float]

_TARGET: Scales = (1.0, 0.0)  # of a residual that is the target's law


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
    tokens, draft_lengths, uniforms = (x.contiguous() for x in (draft_tokens, draft_lengths, uniforms))
    given = None if draft_logits is None else draft_normaliser
    with torch.cuda.device_of(target_logits):  # Triton launches on the current device
        block = read_block(target_logits, tokens, draft_logits, rule, draft_lengths, given, tile)
        block = block._replace(drafted=block.drafted._replace(raised_prob=rule.raised_prob(block.drafted)))
        result = scan(block, rule, draft_lengths, uniforms)
        scales = _residual_scales(rule, block.drafted)
        draw_next(target_logits, tokens, draft_logits, scales or _TARGET, uniforms, block, result, tile)
    if scales is None and tokens.shape[1] > 0:
        return _redraw(target_logits, tokens, draft_logits, rule, uniforms, block, result)
    return result


def _residual_scales(rule: AcceptanceRule, drafted: Drafted) -> Scales | None:
    """The rule's, unless a subclass has a `residual` of its own on top of them."""
    scales_home, residual_home = (
        next(base for base in type(rule).__mro__ if name in vars(base)) for name in ("residual_scales", "residual")
    )
    return rule.residual_scales(drafted) if issubclass(scales_home, residual_home) else None


def _redraw(
    target_logits: Tensor,
    tokens: Tensor,
    draft_logits: Tensor | None,
    rule: AcceptanceRule,
    uniforms: Tensor,
    block: Block,
    result: Verification,
) -> Verification:
    """The result with the replacements drawn as in the reference, for residuals that the kernels do not know."""
    is_rejected = result.num_accepted < result.draft_lengths
    at = result.num_accepted.clamp(max=tokens.shape[1] - 1)
    weights = row_probs(target_logits, block.target, at)
    # Behind the draft lengths there may be any id, which no row here is about.
    tokens = tokens.long().clamp(0, target_logits.shape[2] - 1)
    weights = replacement(weights, tokens, draft_logits, block.draft, rule, block.drafted, at, is_rejected)
    redrawn = draw(weights, uniforms[:, -1])
    return result._replace(next_token=torch.where(is_rejected, redrawn, result.next_token))
