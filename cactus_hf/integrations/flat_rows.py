"""Acceptance rules on the flat batches of serving engines, whose requests' logits stand in succession, unpadded.

Cactus is a change of one logit a row. The law that it aims at has the drafted token at gamma and all others in their
proportions: it is softmax(logits + Delta onehot(n)) with Delta = logit(gamma) - logit(q_n). Given those logits, an
exact lossless verification is Cactus, and keeps its own kernels and seeds. Rules with another test are verified by
`verification.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from ..acceptance import AcceptanceRule, Cactus, Drafted
from ..kl_budget import binary_kl, find_deltas_of_block, has_budget
from ..parameters import move_rule, to_device
from ..probabilities import Normaliser, normalise


# Above the largest logit of a row, where gamma is 1: all others then add nothing to the sum in float32
CERTAIN = 150.0


class Rows(NamedTuple):
    """Rows of drafts under Cactus, among the N rows of a batch."""

    at: Tensor  # [n] int64
    rule: Cactus  # its parameter a number a row

    @property
    def has_budget(self) -> bool:
        """Whether the rule looks at whole laws of the draft."""
        return has_budget(self.rule)


class Raised(NamedTuple):
    """What drafted tokens' logits become; where nothing is raised, bit for bit what they were."""

    logits: Tensor  # [n] in the dtype of the rows
    ball_kl: Tensor  # [n] float64, KL(h || q) in nats


def cactus_rows(
    rules: Mapping[int, AcceptanceRule], starts: Sequence[int], num_drafts: Sequence[int], device: torch.device
) -> list[Rows]:
    """
    The rows under Cactus: those with a delta, and those with a budget, each if there are any.

    Args:
        rules (`dict`):
            The rule of each request that does not have the engine's own law, by its place in the batch.
        starts (`list[int]` of length B):
            The row of each request's first draft.
        num_drafts (`list[int]` of length B):
            Drafted tokens of each request.
        device (`torch.device`):
            Of what is returned.
    """
    found = []
    for is_budget in (False, True):
        chosen = {at: rule for at, rule in rules.items() if isinstance(rule, Cactus) and has_budget(rule) == is_budget}
        index = [starts[at] + place for at in chosen for place in range(num_drafts[at])]
        values = [
            rule.kl_budget if is_budget else rule.delta for at, rule in chosen.items() for _ in range(num_drafts[at])
        ]
        if index:
            parameter = torch.tensor(values, dtype=torch.float64)
            rule = Cactus(kl_budget=parameter) if is_budget else Cactus(parameter)
            found.append(Rows(to_device(torch.tensor(index), device), move_rule(rule, device)))
    return found


def other_rules(rules: Mapping[int, AcceptanceRule], num_drafts: Sequence[int]) -> dict[AcceptanceRule, list[int]]:
    """The places of the requests with drafts under each rule that is no change of logits."""
    places: dict[AcceptanceRule, list[int]] = {}
    for at, rule in rules.items():
        if not isinstance(rule, Cactus) and num_drafts[at] > 0:
            places.setdefault(rule, []).append(at)
    return places


@contextmanager
def raised(
    logits: Tensor,
    rows_of_rules: Sequence[Rows],
    tokens_at: Callable[[Tensor], Tensor],
    draft_logits_at: Callable[[Tensor], Tensor | None],
) -> Iterator[Tensor]:
    """
    Has drafted tokens' logits raised meanwhile; engines take log-probabilities of them later, which are the target's.

    Args:
        logits (`Tensor` of shape `[N, V]`, float32 or float64):
            The target's, after temperature and all processors.
        rows_of_rules (`list[Rows]`):
            Of [`cactus_rows`].
        tokens_at, draft_logits_at (`Callable`):
            From rows `[n]`, the tokens drafted there and the logits of their laws, as [`raise_logits`] takes them.

    Yields:
        `Tensor` of shape `[N]`, float64: KL(h || q) in nats, 0 where nothing is raised.
    """
    ball_kl = torch.zeros(len(logits), dtype=torch.float64, device=logits.device)
    before = []
    for rows in rows_of_rules:
        tokens = tokens_at(rows.at)
        found = raise_logits(logits, rows, tokens, draft_logits_at(rows.at) if rows.has_budget else None)
        at = rows.at, tokens.clamp(min=0)
        before.append((at, logits[at]))
        logits[at], ball_kl[rows.at] = found
    try:
        yield ball_kl
    finally:
        for at, values in before:
            logits[at] = values


def raise_logits(logits: Tensor, rows: Rows, tokens: Tensor, draft_logits: Tensor | None) -> Raised:
    """
    Finds the logits of drafted tokens with which their rows are the laws that Cactus aims at.

    Args:
        logits (`Tensor` of shape `[N, V]`, float32 or float64):
            The target's, after temperature and all processors.
        rows ([`Rows`]):
            Those to change.
        tokens (`Tensor` of shape `[n]`, int64):
            The tokens drafted there; nothing is raised where they are below 0.
        draft_logits (`Tensor` of shape `[n, V]`, *optional*):
            Logits of the laws they were drawn from, needed where a rule has a budget; `None` for drafts without.

    Returns:
        [`Raised`]. It does not wait for the device.
    """
    is_draft = tokens >= 0
    before = logits[rows.at, tokens.clamp(min=0)]
    law = Normaliser(*(field.squeeze(0)[rows.at] for field in normalise(logits.unsqueeze(0))))
    prob = law.probability(before)
    delta = None
    if rows.has_budget:
        target = logits[rows.at].unsqueeze(1)
        draft = None if draft_logits is None else draft_logits.unsqueeze(1)
        delta = find_deltas_of_block(target, draft, rows.rule, prob.unsqueeze(1)).delta.squeeze(1)
    raised_prob = rows.rule.raised_prob(Drafted(prob, prob, delta=delta))
    is_raised = is_draft & (raised_prob > prob)  # false where the target cannot emit the token or is no law
    change = raised_prob.logit() - prob.logit()
    after = torch.where(raised_prob < 1, before.double() + change, law.peak + CERTAIN).to(before.dtype)
    return Raised(after.where(is_raised, before), binary_kl(prob, raised_prob).where(is_raised, 0.0))
