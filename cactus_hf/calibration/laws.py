"""Every rule at the positions of a text, exactly, while the rows of both models are at hand.

Rows are cut to the tokens that either model can emit, so behind a top-k or top-p they are short. What is kept of a
position is a handful of numbers a rule.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..acceptance import AcceptanceRule, Cactus, Drafted
from ..kl_budget import binary_kl, has_budget
from ..law import distances, emission, law_ratio, sorted_cactus_law
from ..probabilities import widened


AT_ONCE = 2**19  # numbers of float64 rows: a dozen such tensors stay under 60 MB
BISECTIONS = 60


class Rows(NamedTuple):
    """Both laws at N positions over the K tokens that count."""

    target: Tensor  # [N, K] float64
    draft: Tensor  # [N, K] float64
    ratio: Tensor  # [N, K], draft over target
    place: Tensor  # [N, 1], where the token of the text stands

    def ascending(self) -> Rows:
        """The same in ascending order of the ratio."""
        ratio, order = self.ratio.sort(-1)
        place = (order == self.place).to(torch.uint8).argmax(-1, keepdim=True)
        return Rows(self.target.gather(-1, order), self.draft.gather(-1, order), ratio, place)


class Values(NamedTuple):
    """What rules come to at N positions, [N, S] each, float64."""

    acceptance: Tensor  # chance that a draft is kept
    kept: Tensor  # chance that the text's token comes up as a kept draft, over its chance in the target's law
    kl: Tensor  # nats, of the emitted law from the target's
    tv: Tensor
    ball_kl: Tensor  # nats, of the law aimed at, in the mean over the drafts


def evaluate(
    target_logits: Tensor,
    draft_logits: Tensor,
    tokens: Tensor,
    rules: Sequence[AcceptanceRule],
    slopes: Sequence[float] = (),
) -> Values:
    """
    Args:
        target_logits, draft_logits (`torch.Tensor` of shape [N, V]): after logits processors. A draft's row without
            a finite logit drafts nothing: all is 0 there.
        tokens (`torch.Tensor` of shape [N]): of the text.
        rules (sequence of [`AcceptanceRule`]): each is a column.
        slopes (sequence of `float`): of the limit, see [`limit_laws`]; the columns behind those of the rules.
    """
    is_drafted = draft_logits.amax(-1) != -torch.inf
    draft_logits = torch.where(is_drafted[:, None], draft_logits, target_logits)
    target_logits, draft_logits, place = _cut(target_logits, draft_logits, tokens[:, None])
    step = max(1, AT_ONCE // target_logits.shape[1])
    parts = zip(*(each.split(step) for each in (target_logits, draft_logits, place)), strict=True)
    values = [_evaluated(_rows(*part), rules, slopes) for part in parts]
    return Values(*(torch.cat(field).where(is_drafted[:, None], 0.0) for field in zip(*values, strict=True)))


def _cut(target_logits: Tensor, draft_logits: Tensor, place: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The logits of the tokens that either law has, and the places of `place` [N, 1] among them."""
    counts = (target_logits != -torch.inf) | (draft_logits != -torch.inf)
    num_tokens = int(counts.sum(-1).max())
    if num_tokens > counts.shape[1] // 2:
        return target_logits, draft_logits, place
    # A row with fewer is filled up with tokens of logit -inf, which change nothing
    ids = counts.to(torch.uint8).topk(num_tokens, sorted=False).indices.sort(-1).values
    place = (ids == place).to(torch.uint8).argmax(-1, keepdim=True)
    return target_logits.gather(-1, ids), draft_logits.gather(-1, ids), place


def _rows(target_logits: Tensor, draft_logits: Tensor, place: Tensor) -> Rows:
    target, draft = (widened(each).softmax(-1, dtype=torch.float64) for each in (target_logits, draft_logits))
    return Rows(target, draft, law_ratio(target, draft), place)


def _evaluated(rows: Rows, rules: Sequence[AcceptanceRule], slopes: Sequence[float]) -> Values:
    ascending = rows.ascending()
    columns = [_of_rule(rows, ascending, rule) for rule in rules]
    columns += [_of_law(ascending, law, torch.minimum(ascending.draft, law)) for law in limit_laws(ascending, slopes)]
    return Values(*(torch.stack(field, -1) for field in zip(*columns, strict=True)))


def _of_rule(rows: Rows, ascending: Rows, rule: AcceptanceRule) -> Values:
    """[N] each."""
    if isinstance(rule, Cactus) and not has_budget(rule):
        return _of_cactus(ascending, rule)
    return _of_law(rows, *emission(rows.target, rows.draft, rule))


def _of_cactus(rows: Rows, rule: Cactus) -> Values:
    """The same for rows in ascending order, which are sorted once for all deltas."""
    raised = rule.raised_prob(Drafted(rows.target, rows.draft))
    law = sorted_cactus_law(rows.target, rows.draft, raised, rows.ratio)
    ball_kl = (rows.draft * binary_kl(rows.target, raised)).sum(-1)
    return _of_law(rows, law, torch.minimum(rows.draft, raised))._replace(ball_kl=ball_kl)


def _of_law(rows: Rows, law: Tensor, kept: Tensor) -> Values:
    """Of an emitted law [N, K], of which `kept` [N, K] are kept drafts."""
    kl, tv = distances(law, rows.target)
    acceptance = kept.sum(-1)
    token_prob = rows.target.gather(-1, rows.place).squeeze(-1)
    token_kept = kept.gather(-1, rows.place).squeeze(-1) / token_prob
    # The text was drawn from the target, but in half precision this pass may round the token out of its top-k or
    # top-p. Then there is the mean over the target's tokens.
    return Values(acceptance, torch.where(token_prob > 0, token_kept, acceptance), kl, tv, torch.zeros_like(kl))


def limit_laws(rows: Rows, slopes: Sequence[float]) -> Iterator[Tensor]:
    """
    The laws h, [N, K] each, that no rule beats: h minimises KL(h || q) - slope * sum_x min(p_x, h_x).

    For rows in ascending order. It is clip(p, b q, b exp(slope) q) with the b that makes it sum to 1. So, over any
    positions, no laws with the same mean acceptance have a smaller mean KL. Slope 0 is the target's law, and an
    infinite one the draft's, as far as the target has its tokens.
    """
    target, draft, ratio, _ = rows
    target_sums, draft_sums = (torch.nn.functional.pad(each.cumsum(-1), (1, 0)) for each in (target, draft))

    def parts(low: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        """Of the sum of the clipped law: what is in proportion to b, and what is not. [N, 1] each."""
        first = torch.searchsorted(ratio, low)
        last = torch.searchsorted(ratio, low * factor, right=True)
        above = (target_sums[:, -1:] - target_sums.gather(-1, last)) * factor
        return target_sums.gather(-1, first) + above, draft_sums.gather(-1, last) - draft_sums.gather(-1, first)

    for factor in map(math.exp, slopes):
        low, high = torch.full_like(target[:, :1], 1 / factor), torch.ones_like(target[:, :1])
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            scaled, fixed = parts(middle, factor)
            is_less = middle * scaled + fixed < 1
            low, high = torch.where(is_less, middle, low), torch.where(is_less, high, middle)
        scaled, fixed = parts(low, factor)
        # The sum is linear in b on this piece; it is flat, and any b will do, where nothing is clipped
        bound = torch.where(scaled > 0, (1 - fixed) / scaled, low).clamp(1 / factor, 1.0)
        yield torch.minimum(torch.maximum(draft, bound * target), bound * factor * target)
