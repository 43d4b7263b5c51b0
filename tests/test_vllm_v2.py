"""Rules in the layout of vLLM's Model Runner V2, with plain loops in the place of its function.

`tests/vllm/test_v2.py` has vLLM's own function.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from v2_steps import LEVEL, Counts, Step, chance_of, lossless, mixed_step, options_of

from cactus_hf import AcceptanceRule, Cactus, Lenience, Mentored, Mixture, TopK, TypicalAcceptance
from cactus_hf.integrations import vllm_v2
from cactus_hf.law import emission


TARGET = torch.tensor([0.40, 0.05, 0.25, 0.10, 0.20, 0.0]).double()
DRAFT = torch.tensor([0.10, 0.35, 0.05, 0.15, 0.25, 0.10]).double()
RULES: list[AcceptanceRule] = [
    Cactus(0.1),
    Cactus(1.0),
    Cactus(kl_budget=0.02),
    Lenience(0.5),
    TopK(2),
    TypicalAcceptance(epsilon=0.15),
    Mixture(0.6),
    Mentored(0.05),
]


@pytest.mark.parametrize("has_draft_logits", [True, False], ids=["probabilistic", "one-hot"])
def test_every_rule_has_its_law_in_a_mixed_batch(has_draft_logits: bool):
    """0 to 2 drafts a request: each verified position emits the rule's law, and keeps as many drafts as it does."""
    each, num = 250, 250 * (len(RULES) + 1)
    num_drafts = torch.randint(3, (num,)).tolist()
    slots = torch.randperm(num).tolist()
    rules = {slot: RULES[slot % 9] for slot in slots if slot % 9 < len(RULES)}
    target = TARGET.log().float().repeat(sum(num_drafts) + num, 1)
    draft = 0.7 * DRAFT.log().float().repeat(num, 2, 1) if has_draft_logits else None
    drafted = None if has_draft_logits else torch.full((len(target),), 3, dtype=torch.int32)
    step = Step(num_drafts, slots, target, draft, torch.full((num,), 0.7), drafted)
    tokens, _ = step.follow(rules, lossless)

    draft_law = DRAFT if has_draft_logits else torch.eye(6).double()[3]
    kept_or_not, extra = torch.zeros(len(RULES) + 1, 2, 6).double(), torch.zeros(6).double()
    for slot, length, row in zip(slots, num_drafts, tokens, strict=True):
        for place, token in enumerate(row):
            if place == length:
                extra[token] += 1
            else:
                kept_or_not[slot % 9, int(place + 1 < len(row)), token] += 1
    assert chance_of(extra, TARGET) > LEVEL
    assert kept_or_not.sum((1, 2)).min() > each / 2
    for counts, rule in zip(kept_or_not, [*RULES, Cactus(0.0)], strict=True):
        law, kept = emission(TARGET, draft_law, rule)
        assert chance_of(counts.flatten(), torch.stack([law - kept, kept]).flatten()) > LEVEL, rule


def test_the_test_can_tell_laws_apart():
    law, kept = emission(TARGET, DRAFT, Cactus(1.0))
    other, other_kept = emission(TARGET, DRAFT, Cactus(0.1))
    assert chance_of(250 * torch.stack([law - kept, kept]), torch.stack([other - other_kept, other_kept])) < LEVEL


@pytest.mark.parametrize("has_draft_logits", [True, False], ids=["probabilistic", "one-hot"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_raised_for_the_call_only(has_draft_logits: bool, dtype: torch.dtype):
    step, rules = mixed_step(has_draft_logits, dtype)
    before, received = step.target.clone(), []

    def spy(target: Tensor, *args, **options) -> tuple[Tensor, Tensor]:
        received.append(target.clone())
        return lossless(target, *args, **options)

    step.follow(rules, spy)
    aimed = step.aimed_at(rules)
    # Found deltas differ by up to .15 %, as the laws that they are found for differ by rounding
    torch.testing.assert_close(received[0].softmax(-1), aimed.softmax(-1), rtol=2e-3, atol=1e-5)
    assert torch.equal(step.target, before)
    is_other = torch.tensor([slot not in rules or step.temperature[slot] == 0 for slot in step.row_slots.tolist()])
    assert torch.equal(received[0][is_other], before[is_other].float())  # bit for bit


def test_without_rules_vllm_gets_its_own_tensor():
    step, _ = mixed_step(True, torch.bfloat16)
    received = []

    def spy(target: Tensor, *args, **options) -> tuple[Tensor, Tensor]:
        received.append(target)
        return lossless(target, *args, **options)

    step.follow({}, spy)
    assert received[0] is step.target


def test_drafts_taken_back_are_not_raised_and_end_the_draft():
    """vLLM writes -1 over drafts that a grammar forbids, or that stand in for ones to come: there it draws from q."""
    target = torch.full((4, 5), -torch.inf)
    target[:, 2] = 0.0  # so q is token 2
    for rule in (Cactus(torch.inf), Lenience(0.5)):
        step = Step([3], [0], target, None, torch.ones(1), torch.tensor([0, 2, -1, 4], dtype=torch.int32))
        tokens, _ = step.follow({0: rule}, lossless)
        assert tokens == [[2, 2]]


def test_only_what_vllm_reads_of_the_target_counts():
    """A target padded beyond the draft's vocabulary: vLLM leaves out the padding, whatever it holds."""
    received = []

    def spy(target: Tensor, *args, **options) -> tuple[Tensor, Tensor]:
        received.append(target.clone())
        return lossless(target[:, :7], *args, **options)

    step, rules = mixed_step(True)
    step.follow(rules, spy)
    step.target = torch.nn.functional.pad(step.target, (0, 2), value=9.0)
    step.follow(rules | {8: Lenience(0.5), 1: TopK(2)}, spy)
    changed = torch.isin(step.row_slots, torch.tensor([1, 8]))
    assert torch.equal(received[1][~changed, :7], received[0][~changed])


def test_chunks_of_a_step_keep_their_requests():
    step, rules = mixed_step(True)
    counts = Counts()
    remembered = vllm_v2.SlotRules(Cactus(0.0), counts)
    remembered.rules = rules
    serving = vllm_v2._Serving(remembered, step.slots.tolist(), step.num_drafts, step.seeds)
    assert serving.take(4) == ([7, 2, 9, 4], [3, 2, 3, 3])
    assert serving.take(5) == ([0, 6, 1, 3, 5], [1, 3, 3, 0, 3])


def test_statistics_are_told_of_every_draft():
    step, rules = mixed_step(True)
    tokens, counts = step.follow(rules, lossless)
    ((num_drafts, num_accepted, ball_kl),) = counts.told
    assert num_drafts == step.num_drafts
    assert num_accepted.tolist() == [len(row) - 1 for row in tokens]
    rows = [row for row in range(len(step.target) - 1) if step.local_pos[row + 1] > 0]
    law, target = step.aimed_at(rules)[rows].double().softmax(-1), step.target[rows].double().softmax(-1)
    expected = torch.special.xlogy(law, law / target).nansum(-1)
    torch.testing.assert_close(ball_kl, expected, rtol=5e-3, atol=1e-5)  # as above


def test_a_slot_has_the_rule_of_its_latest_request():
    rules = vllm_v2.SlotRules(Cactus(0.3), Counts())
    assert not rules.add_request(4, options_of(cactus_delta=0.5))
    rules.add_request(2, options_of())
    rules.add_request(3, options_of(cactus_kl=0.1))
    assert rules.rules == {4: Cactus(0.5), 2: Cactus(0.3), 3: Cactus(kl_budget=0.1)}
    rules.add_request(4, options_of(cactus_delta=0))
    greedy = options_of(cactus_delta=0.5)
    greedy.temperature = 0.0
    rules.add_request(2, greedy)
    assert rules.rules == {3: Cactus(kl_budget=0.1)}
