"""How often rounds of decoding would verify each position of a text, and what a run would report.

A run reports means over the drafts it verifies: those up to and including the first rejection of each round. Position
j of a round is among them only if all before it were kept. Rounds begin behind a rejection, or one token behind a
draft that was kept in full. Both follow from the chances at the positions of a text, without drawing anything.

The texts are the target's own, while those of a run follow the rule's emitted law. In means within a round this is
made up for: a kept token weighs what its chance as a kept draft is over its chance in the target's law. These weights
vary much, which hardly matters in a ratio of two sums with the same weights; how many drafts are verified comes from
the acceptance alone. What the rule did to the text before the round is left out, so the figures are exact for the
lossless rule and a prediction for others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .laws import Values


LOSSLESS = 1e-9  # nats; more than rounding leaves of a KL that is 0
# Sums over the rounds of a text, in this order
FIELDS = ("rounds", "verified", "weight", "accepted", "kl", "tv", "ball_kl")


def round_sums(values: Values, is_drafted: Tensor, longest: int, max_new_tokens: int) -> Tensor:
    """
    What the rounds of a text come to in the mean.

    Args:
        values ([`Values`] of N positions and S rules): the first position is that of the first token behind the
            prompt, which belongs to no round.
        is_drafted (`torch.Tensor` of shape [N]): where the draft has a law at all.
        longest (`int`): M.
        max_new_tokens (`int`): of the call; as in the loop, no round drafts beyond the last but one.

    Returns:
        `torch.Tensor` of shape [S, M, 7], float64: for each rule and draft length m = 1 ... M the sums of `FIELDS`:
        the rounds and the drafts verified, then over the drafts verified the sums of their weights, and of the
        acceptance, KL, total variation and ball KL with these weights.
    """
    num_positions, num_rules = values.acceptance.shape
    # Where the texts are the rule's own, a token tells more of whether a draft was kept than the laws do
    is_own = values.kl.amax(0) < LOSSLESS
    chances = torch.where(is_own, values.kept, values.acceptance)
    begins = _begins(chances, longest, max_new_tokens)  # [N, S, M]
    room = (torch.arange(longest) < max_new_tokens - 1 - torch.arange(num_positions)[:, None])[:, None]
    reached, weights = (_reached(_windows(each, longest)) * room for each in (chances, values.kept))
    drafted = is_drafted.to(chances.dtype)[:, None].expand(-1, num_rules)
    weighted = (drafted, values.acceptance, values.kl, values.tv, values.ball_kl)
    # A mixture's KL may be infinite; where no round comes, that is no matter
    by_place = [reached * _windows(drafted, longest)]
    by_place += [torch.where(weights > 0, weights * _windows(field, longest), 0.0) for field in weighted]
    by_length = [torch.where(begins > 0, begins * each.cumsum(-1), 0.0) for each in by_place]  # for each m
    sums = [begins.sum(0), *(each.sum(0) for each in by_length)]
    return torch.stack(sums, -1)


def _windows(values: Tensor, longest: int) -> Tensor:
    """[N, S, M]: of each position the values [N, S] there and at the next ones, 0 behind the end."""
    return torch.nn.functional.pad(values, (0, 0, 0, longest - 1)).unfold(0, longest, 1)


def _reached(windows: Tensor) -> Tensor:
    """[N, S, M]: the product of the values at the places before each place."""
    return torch.cat([torch.ones_like(windows[..., :1]), windows[..., :-1]], -1).cumprod(-1)


def _begins(chances: Tensor, longest: int, max_new_tokens: int) -> Tensor:
    """[N, S, M]: how likely a round begins at a position, for each draft length, by the chances [N, S] of a draft."""
    num_positions, num_rules = chances.shape
    windows = _windows(chances, longest)
    reached = torch.cat([torch.ones_like(windows[..., :1]), windows], -1).cumprod(-1)  # [N, S, M + 1]
    ends = reached[..., :-1] * (1 - windows)  # at each place of a round, its first rejection
    begins = chances.new_zeros(num_positions + longest + 1, num_rules, longest)
    begins[1:2] = 1.0
    place, every = torch.arange(longest)[:, None, None], torch.arange(longest)
    for position in range(1, num_positions):
        num_drafts = (every + 1).clamp(max=max_new_tokens - 1 - position)  # for each m
        begin = begins[position]
        behind = position + 1
        rejected = ends[position].T[..., None] * begin
        begins[behind : behind + longest] += rejected * (place < num_drafts)
        all_kept = reached[position][:, num_drafts] * begin
        begins[behind + num_drafts, :, every] += all_kept.T
    return begins[:num_positions]
