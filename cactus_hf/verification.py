"""Verification of drafted tokens: how many of each row are kept, and which token follows them.

[`verify`] is the public function, with every check; [`verify_block`] is the same without checks and without waiting
for the device, for the decoding loop. [`match_greedy`] is their counterpart for greedy decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import kernels
from .acceptance import AcceptanceRule, Drafted
from .checks import bad_target_error, check_block, check_draft_lengths, check_uniforms, warn_bad_draft
from .kl_budget import Found, binary_kl, find_deltas_of_block, has_budget
from .parameters import move_rule
from .probabilities import (
    LEAST_TOTAL,
    Normaliser,
    are_laws,
    draw,
    laws_at,
    normalise,
    row_probs,
    token_logits,
    widened,
)


class Verification(NamedTuple):
    """What became of a block of drafted tokens. In a row whose `bad_target` is not -1, the rest means nothing."""

    num_accepted: Tensor  # [B] int64; drafted tokens kept
    next_token: Tensor  # [B] int64; what follows them: a replacement, or an extra token if all were kept
    is_boosted: Tensor  # [B, m] bool; kept, where lossless speculative sampling with the same uniform would reject
    ball_kl: Tensor  # [B, m] float64; KL(h || q) in nats of the law aimed at; 0 if not verified or nothing is raised
    num_verified: Tensor  # [B] int64; positions up to and including the first rejection
    draft_lengths: Tensor  # [B] int64; drafted tokens up to the first draft row that is no law
    bad_target: Tensor  # [B] int64; position of the first target row that is no law, else -1: see `bad_target_error`
    # Of a rule with `kl_budget` or `kl_total`, [B, m] float64; 0 if not verified
    emitted_kl: Tensor | None = None  # KL(h_alg || q) in nats of the law emitted
    emitted_tv: Tensor | None = None  # its total variation distance from q


def verify(
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor | None,
    rule: AcceptanceRule,
    *,
    draft_lengths: Tensor | Sequence[int] | None = None,
    generator: torch.Generator | None = None,
    uniforms: Tensor | None = None,
) -> Verification:
    """
    Keeps the drafted tokens of each row up to the first that is rejected, and draws the token that follows them.

    Args:
        target_logits (`Tensor` of shape `[B, m + 1, V]`):
            The target's logits, after logits processors: position i holds the law of drafted token i, and the position
            after the last drafted token that of the extra token.
        draft_tokens (`Tensor` of shape `[B, m]`, integer):
            The drafted tokens.
        draft_logits (`Tensor` of shape `[B, m, V]`, or `None`):
            The logits the tokens were drawn from, after logits processors; `None` if they were looked up, not drawn.
        rule ([`AcceptanceRule`]):
            The rule, its parameters one number or one a row.
        draft_lengths (`Tensor` or `list` of shape `[B]`, *optional*, defaults to `m` everywhere):
            Number of drafted tokens of each row. What lies beyond is ignored, whatever it holds.
        generator (`torch.Generator`, *optional*):
            Source of the uniforms, if they are not given; PyTorch's global generator by default.
        uniforms (`Tensor` of shape `[B, m + 1]`, *optional*):
            Numbers in [0, 1): one for each drafted token, and the last for the next token.

    Returns:
        [`Verification`]

    With [`SpeculativeSampling`] or `Cactus(0)` the tokens kept and the next one follow the target's law, if those
    drafted were drawn from the draft's.

    Example:

    ```python
    >>> import torch
    >>> from cactus_hf import Cactus
    >>> from cactus_hf.verification import verify
    >>> target = torch.tensor([[[0.2, 0.8], [1.0, 0.0]]]).log()
    >>> draft = torch.tensor([[[0.8, 0.2]]]).log()
    >>> uniforms = torch.tensor([[0.5, 0.9]])
    >>> for delta in (0.0, 0.5):  # the chance of keeping token 0 is .2 / .8, then .6 / .8
    ...     result = verify(target, torch.tensor([[0]]), draft, Cactus(delta), uniforms=uniforms)
    ...     print(result.num_accepted.item(), result.next_token.item())
    0 1
    1 0

    ```
    """
    check_block(target_logits, draft_tokens, draft_logits, rule)
    lengths = check_draft_lengths(draft_lengths, draft_tokens, vocab_size=target_logits.shape[2])
    device = target_logits.device
    if uniforms is None:
        shape = (draft_tokens.shape[0], draft_tokens.shape[1] + 1)
        source = device if generator is None else generator.device
        uniforms = torch.rand(shape, generator=generator, dtype=torch.float64, device=source).to(device)
    elif generator is not None:
        raise ValueError("`generator` and `uniforms` were both given: give one of them.")
    else:
        check_uniforms(uniforms, draft_tokens)

    result = verify_block(target_logits, draft_tokens, draft_logits, move_rule(rule, device), lengths, uniforms)

    for row, position in enumerate(result.bad_target.tolist()):
        if position >= 0:
            raise bad_target_error(row, position)
    if bool((result.draft_lengths < lengths).any()):
        warn_bad_draft()
    return result


def verify_block(
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor | None,
    rule: AcceptanceRule,
    draft_lengths: Tensor,
    uniforms: Tensor,
    draft_normaliser: Normaliser | None = None,
) -> Verification:
    """
    [`verify`] without its checks and without waiting for the device: all tensors on one device, `draft_lengths` int64.

    Of each position it reads the normaliser and the drafted token's logit, and of each sequence one whole row. A draft
    that has kept the `draft_normaliser` `[B, m]` of its rows spares them the reading.
    """
    if kernels.serves(target_logits, draft_logits, rule):
        return kernels.verify_block(
            target_logits, draft_tokens, draft_logits, rule, draft_lengths, uniforms, draft_normaliser
        )
    num_drafted = draft_tokens.shape[1]
    position = torch.arange(num_drafted, device=draft_tokens.device)
    is_drafted = position < draft_lengths.unsqueeze(1)
    tokens = draft_tokens.long().masked_fill(~is_drafted, 0)

    target = normalise(target_logits)
    up_to_last = Normaliser(target.peak[:, :num_drafted], target.total[:, :num_drafted])
    target_prob = up_to_last.probability(token_logits(target_logits, tokens))
    if draft_logits is None:
        draft, lengths, draft_prob = None, draft_lengths, torch.ones_like(target_prob)
    else:
        draft = draft_normaliser or normalise(draft_logits)
        lengths = num_leading(is_drafted & are_laws(draft.peak))
        draft_prob = draft.probability(token_logits(draft_logits, tokens))
    entropy, rank = _entropy_and_rank(rule.needs, target_logits[:, :num_drafted], tokens)
    from_rows = _from_rows(rule, target_logits, draft_logits, tokens)
    drafted = Drafted(target_prob, draft_prob, entropy, rank, from_rows=from_rows)
    tests = uniforms[:, :num_drafted].double()
    found = _within_budget(rule, (target_logits, draft_logits), drafted, tests, lengths)
    drafted = drafted._replace(delta=found and found.delta)
    drafted = drafted._replace(raised_prob=rule.raised_prob(drafted))

    is_law = are_laws(target.peak)
    is_kept = is_law[:, :num_drafted] & (tests < rule.accept(drafted))
    num_accepted = torch.minimum(num_leading(is_kept), lengths)
    is_rejected = num_accepted < lengths
    num_verified = num_accepted + is_rejected

    weights = row_probs(target_logits, target, num_accepted)
    # A GPU cannot be asked, but on a CPU a round that keeps all drafts needs none of their rows
    if num_drafted > 0 and not (is_rejected.is_cpu and not is_rejected.any()):
        at = num_accepted.clamp(max=num_drafted - 1)  # the first rejection, or a row whose residual is not used
        weights = replacement(weights, tokens, draft_logits, draft, rule, drafted, at, is_rejected)
    next_token = draw(weights, uniforms[:, num_drafted])

    is_verified = position < num_verified.unsqueeze(1)
    return Verification(
        num_accepted=num_accepted,
        next_token=next_token,
        is_boosted=(position < num_accepted.unsqueeze(1)) & (tests * draft_prob >= target_prob),  # u >= q/p
        ball_kl=_ball_kl(drafted).where(is_verified, 0.0),
        num_verified=num_verified,
        draft_lengths=lengths,
        bad_target=_first_bad_target(target.peak, is_law, draft_lengths, num_accepted),
        emitted_kl=found and found.kl.where(is_verified, 0.0),
        emitted_tv=found and found.tv.where(is_verified, 0.0),
    )


def replacement(
    target_probs: Tensor,
    tokens: Tensor,
    draft_logits: Tensor | None,
    draft: Normaliser | None,
    rule: AcceptanceRule,
    drafted: Drafted,
    at: Tensor,
    is_rejected: Tensor,
) -> Tensor:
    """Weights `[B, V]` of the next token: the residual where the draft at position `at` `[B]` was rejected, else q."""
    token = tokens.gather(1, at.unsqueeze(1))
    if draft_logits is None or draft is None:
        draft_probs = torch.zeros_like(target_probs).scatter_(1, token, 1.0)
    else:
        dtype = torch.promote_types(target_probs.dtype, draft_logits.dtype)
        draft_probs = row_probs(draft_logits, draft, at).to(dtype)
        # A rule that compares the laws rejects only if p_n > q_n. The rows are rounded otherwise than the scalars
        # that decided; where they disagree, n itself would be drawn again.
        at_least = target_probs.gather(1, token)
        draft_probs.scatter_(1, token, torch.maximum(draft_probs.gather(1, token), at_least))
    residual = rule.residual(target_probs, draft_probs, _select(drafted, at))
    is_residual = is_rejected & (residual.sum(-1).double() >= LEAST_TOTAL)
    return torch.where(is_residual.unsqueeze(1), residual, target_probs)


def match_greedy(target_logits: Tensor, draft_tokens: Tensor, draft_lengths: Tensor) -> Verification:
    """
    Keeps the drafted tokens that equal the target's most likely ones, up to the first that does not.

    At temperature 0 every rule comes to this, and the text is that of plain greedy decoding. Arguments as in
    [`verify_block`]; on ties the lowest id is the most likely.
    """
    num_drafted = draft_tokens.shape[1]
    position = torch.arange(num_drafted, device=draft_tokens.device)
    peak, best = target_logits.max(-1)
    is_kept = (draft_tokens == best[:, :num_drafted]) & (position < draft_lengths.unsqueeze(1))
    num_accepted = num_leading(is_kept)
    return Verification(
        num_accepted=num_accepted,
        next_token=best.gather(1, num_accepted.unsqueeze(1)).squeeze(1),
        is_boosted=torch.zeros_like(is_kept),
        ball_kl=torch.zeros(is_kept.shape, dtype=torch.float64, device=is_kept.device),
        num_verified=num_accepted + (num_accepted < draft_lengths).long(),
        draft_lengths=draft_lengths,
        bad_target=_first_bad_target(peak, are_laws(peak), draft_lengths, num_accepted),
    )


def num_leading(flags: Tensor) -> Tensor:
    """How many of the flags [B, m] are set before the first that is not."""
    return flags.cumprod(1).sum(1)


def _select(drafted: Drafted, at: Tensor) -> Drafted:
    """The scalars `[B]` of the drafted token at position `at[b]` of each sequence."""
    at = at.unsqueeze(1)

    def pick(field: Tensor) -> Tensor:
        return field.gather(1, at if field.dim() == 2 else at.unsqueeze(2).expand(-1, -1, field.shape[2])).squeeze(1)

    return Drafted._make(None if field is None else pick(field) for field in drafted)


def _entropy_and_rank(needs: frozenset[str], logits: Tensor, tokens: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Entropy in nats of each target row, and the number of tokens above the drafted one, if the rule needs them."""
    entropy = rank = None
    if "entropy" in needs:
        entropy = torch.special.entr(widened(logits).softmax(-1)).sum(-1).double()
    if "rank" in needs:
        rank = (logits > logits.gather(-1, tokens.unsqueeze(-1))).sum(-1)
    return entropy, rank


def _from_rows(
    rule: AcceptanceRule, target_logits: Tensor, draft_logits: Tensor | None, tokens: Tensor
) -> Tensor | None:
    """What the rule makes of whole rows [B, m, k], if it needs them; a position at a time, as a row is large."""
    if "rows" not in rule.needs:
        return None
    if tokens.shape[1] == 0:
        none = target_logits[:, :0].double()
        return rule.read_rows(none, none)
    laws = (laws_at(target_logits, draft_logits, tokens, position) for position in range(tokens.shape[1]))
    return torch.stack([rule.read_rows(target, draft) for target, draft in laws], dim=1)


def _within_budget(
    rule: AcceptanceRule, logits: tuple[Tensor, Tensor | None], drafted: Drafted, tests: Tensor, lengths: Tensor
) -> Found | None:
    """The deltas of a rule with a budget, up to where the `tests` [B, m] reject a draft of every row."""
    if not has_budget(rule):
        return None

    def goes_on(i: int, delta: Tensor) -> Tensor:
        at = Drafted(drafted.target_prob[:, i], drafted.draft_prob[:, i], delta=delta)
        return (i + 1 < lengths) & (tests[:, i] < rule.accept(at))

    return find_deltas_of_block(*logits, rule, drafted.target_prob, goes_on)


def _ball_kl(drafted: Drafted) -> Tensor:
    """KL(h || q) in nats: that of (gamma, 1 - gamma) from (q_n, 1 - q_n), as the others keep their proportions."""
    target_prob, raised_prob = drafted.target_prob, drafted.raised_prob
    if raised_prob is None or raised_prob is target_prob:
        return torch.zeros_like(target_prob)
    return binary_kl(target_prob, raised_prob)


def _first_bad_target(peak: Tensor, is_law: Tensor, draft_lengths: Tensor, num_accepted: Tensor) -> Tensor:
    """Position of the first target row that holds NaN or +inf, or that is reached and empty; -1 if there is none."""
    if is_law.is_cpu and is_law.all():
        return torch.full_like(num_accepted, -1)
    position = torch.arange(peak.shape[1], device=peak.device)
    # An empty row behind a rejection is no fault: a grammar allows nothing after a token that it forbids.
    last = torch.where(peak == -torch.inf, num_accepted.unsqueeze(1), draft_lengths.unsqueeze(1))
    is_bad = ~is_law & (position <= last)
    return torch.where(is_bad.any(1), is_bad.to(torch.uint8).argmax(1), -1)
