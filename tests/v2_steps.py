"""Steps of vLLM's Model Runner V2 as its `rejection_sample` gets them, without vLLM."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from cactus_hf import AcceptanceRule
from cactus_hf.acceptance import Cactus, Drafted
from cactus_hf.integrations import vllm_v2
from cactus_hf.kl_budget import find_deltas, has_budget


LEVEL = 1e-4  # at which a correct sampler fails a comparison of frequencies


class Counts:
    """In the place of `Statistics`: what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[list[int], Tensor, Tensor]] = []

    def add(self, num_drafts: list[int], num_accepted: Tensor, ball_kl: Tensor) -> None:
        self.told.append((num_drafts, num_accepted.clone(), ball_kl))


class Step:
    """
    Requests with ragged drafts, in any slots of a table.

    Args:
        num_drafts (`list[int]`):
            Of each request.
        slots (`list[int]`):
            Of each request.
        target (`Tensor` of shape `[N, V]`):
            Logits after temperature.
        draft (`Tensor` of shape `[slots, m, V]`, *optional*):
            Logits before temperature.
        temperature (`Tensor` of shape `[slots]`):
            0 for greedy requests.
        drafted (`Tensor` of shape `[N]`, *optional*, defaults to draws from the draft):
            The token before each row.
    """

    def __init__(
        self,
        num_drafts: list[int],
        slots: list[int],
        target: Tensor,
        draft: Tensor | None,
        temperature: Tensor,
        drafted: Tensor | None = None,
    ) -> None:
        num_rows = torch.tensor(num_drafts) + 1
        self.num_drafts, self.target, self.draft, self.temperature = num_drafts, target, draft, temperature
        self.starts = torch.nn.functional.pad(num_rows.cumsum(0), (1, 0)).int()
        self.slots = torch.tensor(slots, dtype=torch.int32)
        self.row_slots = self.slots.repeat_interleave(num_rows)
        self.local_pos = (torch.arange(len(target)) - self.starts[:-1].repeat_interleave(num_rows)).int()
        self.pos = 100 + self.local_pos.long()
        self.seeds = torch.randint(2**62, (len(temperature),))
        self.drafted = self._drawn() if drafted is None else drafted

    def _drawn(self) -> Tensor:
        if self.draft is None:
            return torch.randint(self.target.shape[1], (len(self.target),), dtype=torch.int32)
        slot, place = self.row_slots.long(), (self.local_pos.long() - 1).clamp(min=0)
        logits = self.draft[slot, place] / self.temperature[slot].clamp(min=1e-3)[:, None]
        return logits.softmax(-1).multinomial(1).squeeze(1).int()

    def run(self, function: Callable[..., tuple[Tensor, Tensor]], target: Tensor | None = None) -> list[list[int]]:
        """The tokens that each request gets."""
        sampled, num_sampled = function(
            self.target if target is None else target, self.draft, self.drafted, self.starts, self.pos, self.slots,
            self.row_slots, self.local_pos, self.temperature, self.seeds, max(self.num_drafts), None,
            use_fp64=False, use_block_verification=False,
        )  # fmt: skip
        return [row[:num].tolist() for row, num in zip(sampled, num_sampled.tolist(), strict=True)]

    def follow(
        self, rules: dict[int, AcceptanceRule], original: Callable[..., tuple[Tensor, Tensor]]
    ) -> tuple[list[list[int]], Counts]:
        """The tokens, and what was counted, when the slots have `rules` and the others their greedy or own law."""
        counts: Any = Counts()
        remembered = vllm_v2.SlotRules(Cactus(0.0), counts)
        remembered.rules = {slot: rule for slot, rule in rules.items() if self.temperature[slot] > 0}
        serving = vllm_v2._Serving(remembered, self.slots.tolist(), self.num_drafts, self.seeds)
        token = vllm_v2._serving.set(serving)
        try:
            return self.run(vllm_v2._following_rules(original)), counts
        finally:
            vllm_v2._serving.reset(token)

    def aimed_at(self, rules: dict[int, AcceptanceRule]) -> Tensor:
        """The target's logits, with whole rows of the laws that Cactus aims at."""
        rows = self.target.double().clone()
        for row in range(len(rows) - 1):
            token, slot, place = self.drafted[row + 1].item(), self.row_slots[row].item(), self.local_pos[row].item()
            rule = rules.get(slot)
            if self.local_pos[row + 1] == 0 or token < 0 or self.temperature[slot] == 0 or rule is None:
                continue
            law = rows[row].softmax(-1)
            delta = None
            if has_budget(rule):
                draft = torch.eye(len(law)).double()[token]
                if self.draft is not None:
                    draft = (self.draft[slot, place].double() / self.temperature[slot]).softmax(-1)
                delta = find_deltas(law, draft, rule).delta
            prob = law[token].clone()
            gamma = rule.raised_prob(Drafted(prob, prob, delta=delta))
            law *= (1 - gamma) / (1 - prob)
            law[token] = gamma
            rows[row] = law.log()
        return rows.float()


def mixed_step(has_draft_logits: bool, dtype: torch.dtype = torch.float32) -> tuple[Step, dict[int, AcceptanceRule]]:
    """Nine requests of 0 to 3 drafts, in other slots than their places; slots 2 and 6 are greedy."""
    deltas = {1: 0.05, 2: 0.5, 3: 3.0, 4: float("inf"), 6: 0.2, 8: 1.0}
    rules: dict[int, AcceptanceRule] = {slot: Cactus(delta) for slot, delta in deltas.items()}
    rules |= {5: Cactus(kl_budget=0.05), 9: Cactus(kl_budget=0.3)}
    slots, num_drafts = [7, 2, 9, 4, 0, 6, 1, 3, 5], [3, 2, 3, 3, 1, 3, 3, 0, 3]
    temperature = torch.tensor([1.0, 0.7, 0.0, 1.3, 1.0, 0.7, 0.0, 1.0, 1.0, 2.0])
    draft = torch.randn(10, 3, 7) * 2
    target = torch.randn(sum(num_drafts) + len(num_drafts), 7) * 2
    target[:4, 4:] = -torch.inf  # the first request's top-k
    return Step(num_drafts, slots, target.to(dtype), draft if has_draft_logits else None, temperature), rules


def lossless(
    target_logits: Tensor,
    draft_logits: Tensor | None,
    draft_sampled: Tensor,
    starts: Tensor,
    pos: Tensor,
    slots: Tensor,
    row_slots: Tensor,
    local_pos: Tensor,
    temperature: Tensor,
    *args: Any,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Speculative sampling in plain loops, in the place of vLLM's function."""
    target = target_logits.double().softmax(-1)
    num_requests = len(starts) - 1
    sampled = torch.zeros(num_requests, int((starts[1:] - starts[:-1]).max()), dtype=torch.int64)
    num_sampled = torch.ones(num_requests, dtype=torch.int32)
    for request, (start, end) in enumerate(zip(starts.tolist(), starts[1:].tolist(), strict=False)):
        row, weights = start, target[start]
        while row < end - 1 and (token := int(draft_sampled[row + 1])) >= 0:
            draft = torch.eye(target.shape[1]).double()[token]
            if draft_logits is not None:
                slot = int(row_slots[row])
                draft = (draft_logits[slot, int(local_pos[row])].double() / temperature[slot]).softmax(-1)
            if torch.rand(1) * draft[token] >= target[row, token]:
                weights = (target[row] - draft).clamp(min=0)
                break
            sampled[request, row - start] = token
            row += 1
            weights = target[row]
        sampled[request, row - start] = weights.multinomial(1)
        num_sampled[request] = row - start + 1
    return sampled, num_sampled


def options_of(**extra_args: Any) -> SimpleNamespace:
    """In the place of a request's `SamplingParams`."""
    return SimpleNamespace(extra_args=extra_args, temperature=1.0, structured_outputs=None)


def chance_of(counts: Tensor, chances: Tensor) -> float:
    """The chance of so large a chi-square; 0 if there is what cannot be. Cells of less than 5 are pooled."""
    if counts[chances == 0].any():
        return 0.0
    expected = chances * counts.sum()
    is_common = expected >= 5
    counts, expected = (torch.cat([x[is_common], x[~is_common].sum()[None]]) for x in (counts, expected))
    counts, expected = counts[expected > 0], expected[expected > 0]
    if len(counts) == 1:
        return 1.0
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2).double(), statistic / 2))
