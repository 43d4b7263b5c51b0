"""Checks of the tensors handed to the public functions: every mistake is a `ValueError` that says what to do.

They look at values, and so wait for the device; the decoding loop runs none of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from .acceptance import AcceptanceRule
from .parameters import check_num_rows


_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def check_block(
    target_logits: Tensor, draft_tokens: Tensor, draft_logits: Tensor | None, rule: AcceptanceRule
) -> None:
    """Checks types, shapes and devices of a block, and the rule's rows against it."""
    _check_rule(rule)
    for name, logits in (("target_logits", target_logits), ("draft_logits", draft_logits)):
        is_absent = name == "draft_logits" and logits is None
        if not is_absent and not (isinstance(logits, Tensor) and logits.is_floating_point() and logits.dim() == 3):
            raise ValueError(f"`{name}` must be a floating tensor of three dimensions; got {_type_of(logits)}.")
    if not isinstance(draft_tokens, Tensor) or draft_tokens.dtype not in _INTEGERS or draft_tokens.dim() != 2:
        raise ValueError(f"`draft_tokens` must be an integer tensor of shape [B, m]; got {_type_of(draft_tokens)}.")
    batch_size, num_drafted = draft_tokens.shape
    vocab_size = target_logits.shape[2]
    if target_logits.shape != (batch_size, num_drafted + 1, vocab_size) or vocab_size == 0:
        raise ValueError(
            f"`target_logits` must have the shape [B, m + 1, V], here [{batch_size}, {num_drafted + 1}, V], as "
            f"`draft_tokens` has the shape [B, m] = {list(draft_tokens.shape)}; got {list(target_logits.shape)}."
        )
    if draft_logits is not None and draft_logits.shape != (batch_size, num_drafted, vocab_size):
        raise ValueError(
            f"`draft_logits` must have the shape [B, m, V], here [{batch_size}, {num_drafted}, {vocab_size}]; got "
            f"{list(draft_logits.shape)}. If it is V that differs, pad the smaller vocabulary's logits with -inf."
        )
    devices = {str(tensor.device) for tensor in (target_logits, draft_tokens, draft_logits) if tensor is not None}
    if len(devices) > 1:
        raise ValueError(
            f"Logits and tokens must be on one device, not {' and '.join(sorted(devices))}: use `.to(device)`."
        )
    check_num_rows(rule, batch_size)


def check_draft_lengths(draft_lengths: Tensor | Sequence[int] | None, draft_tokens: Tensor, vocab_size: int) -> Tensor:
    """Checks the lengths, and the token ids within them; returns the lengths as an int64 tensor `[B]`."""
    batch_size, num_drafted = draft_tokens.shape
    device = draft_tokens.device
    if draft_lengths is None:
        lengths = torch.full((batch_size,), num_drafted, device=device)
    else:
        lengths = torch.as_tensor(draft_lengths, device=device)
        if lengths.shape != (batch_size,) or lengths.dtype not in _INTEGERS:
            raise ValueError(f"`draft_lengths` must be {batch_size} integers, one a row; got {draft_lengths!r}.")
        lengths = lengths.long()
        if not bool(((lengths >= 0) & (lengths <= num_drafted)).all()):
            raise ValueError(f"`draft_lengths` must lie between 0 and m = {num_drafted}; got {lengths.tolist()}.")
    is_drafted = torch.arange(num_drafted, device=device) < lengths.unsqueeze(1)
    is_outside = is_drafted & ((draft_tokens < 0) | (draft_tokens >= vocab_size))
    if bool(is_outside.any()):
        row, position = is_outside.nonzero()[0].tolist()
        raise ValueError(
            f"`draft_tokens` must hold ids from 0 to {vocab_size - 1}; got {int(draft_tokens[row, position])} in row "
            f"{row} at position {position}. Mark padding by `draft_lengths`: ids beyond them may be anything."
        )
    return lengths


def check_uniforms(uniforms: Tensor, draft_tokens: Tensor) -> None:
    """Checks the random numbers of a block."""
    shape = (draft_tokens.shape[0], draft_tokens.shape[1] + 1)
    if not isinstance(uniforms, Tensor) or not uniforms.is_floating_point() or uniforms.shape != shape:
        raise ValueError(f"`uniforms` must be a floating tensor of shape {list(shape)}; got {_type_of(uniforms)}.")
    if uniforms.device != draft_tokens.device:
        raise ValueError(f"`uniforms` must be on {draft_tokens.device}, as the tokens are; got {uniforms.device}.")
    if not bool(((uniforms >= 0) & (uniforms < 1)).all()):
        raise ValueError("`uniforms` must lie in [0, 1), 1 excluded: draw them with `torch.rand`.")


def check_laws(target_probs: Tensor, draft_probs: Tensor, rule: AcceptanceRule) -> None:
    """Checks two tensors of probability distributions of one shape `[..., V]`, and the rule's rows against them."""
    _check_rule(rule)
    for name, probs in (("target_probs", target_probs), ("draft_probs", draft_probs)):
        if not isinstance(probs, Tensor) or not probs.is_floating_point() or probs.dim() == 0:
            raise ValueError(f"`{name}` must be a floating tensor of shape [..., V]; got {_type_of(probs)}.")
    if target_probs.shape != draft_probs.shape or target_probs.device != draft_probs.device:
        raise ValueError(
            "`target_probs` and `draft_probs` must have one shape and device; got "
            f"{list(target_probs.shape)} on {target_probs.device}, {list(draft_probs.shape)} on {draft_probs.device}."
        )
    for name, probs in (("target_probs", target_probs), ("draft_probs", draft_probs)):
        if not bool((probs >= 0).all()):
            raise ValueError(f"`{name}` must hold probabilities; got a negative number or NaN. Are these logits?")
        # PyTorch's float32 softmax is off by 1e-5 in its sum over 150 thousand tokens.
        tolerance = 1e-6 if probs.dtype == torch.float64 else 1e-4
        error = (probs.sum(-1, dtype=torch.float64) - 1).abs()
        if not bool((error <= tolerance).all()):
            raise ValueError(
                f"`{name}` must sum to 1 over its last dimension, within {tolerance}; a sum is off by "
                f"{error.max():.3g}. Take the softmax in float32 or float64."
            )
    check_num_rows(rule, target_probs.shape[0] if target_probs.dim() > 1 else 1)


def bad_target_error(row: int, position: int) -> ValueError:
    """The error for a target row that cannot be sampled from (`Verification.bad_target`)."""
    return ValueError(
        f"The target's logits of row {row} at position {position} of the block hold NaN or +inf, or are all -inf, so "
        "no token can be drawn. Check the model's dtype (float16 overflows easily), and that the logits processors "
        "leave at least one token."
    )


def warn_bad_draft() -> None:
    """Warns that drafts were dropped; once, as Python shows a warning once for each place in the code."""
    warnings.warn(
        "The draft's logits hold NaN or +inf, or are all -inf, at some position. The drafts from there on are dropped "
        "and the target is sampled: the text is right but slower to come. Check the draft's dtype and weights.",
        RuntimeWarning,
        stacklevel=3,
    )


def _check_rule(rule: AcceptanceRule) -> None:
    if not isinstance(rule, AcceptanceRule):
        raise ValueError(f"`rule` must be an acceptance rule such as `Cactus(1.0)`; got {rule!r}.")  # noqa: TRY004


def _type_of(value: object) -> str:
    return f"{value.dtype} of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
