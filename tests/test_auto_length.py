"""The schedule "auto" on simulated texts and costs. Seeds were fixed beforehand, and nothing is timed."""

from __future__ import annotations

import itertools

import pytest
import simulation
import torch
from simulation import CHANCES, CURVES, make, seconds, texts

from cactus_hf.auto_length import FIRST_CHECK, AutoSchedule


@pytest.mark.parametrize(
    ("num_tokens", "num_texts", "mean", "worst", "of_plain"), ((100, 4, 0.97, 0.9, 0.95), (1000, 1, 0.99, 0.93, 0.97))
)
def test_given_costs_come_close_to_the_best_fixed_length(num_tokens, num_texts, mean, worst, of_plain):
    """What is lost is what it takes to find out, so a text of 100 tokens loses more."""
    shares = []
    for curve, chance in itertools.product(CURVES.values(), CHANCES.values()):
        written = texts(chance, num_tokens, num_texts)
        took = seconds(written, curve, is_given=True)
        shares.append(simulation.fastest(written, curve) / took)
        assert shares[-1] > worst
        assert simulation.fixed(written, curve, 0) / took > of_plain
    assert sum(shares) / len(shares) > mean


@pytest.mark.parametrize("name", CURVES)
def test_drafts_that_are_never_kept_cost_little_with_timed_rounds(name: str):
    """Rounds are disturbed by .12 (log-normal), and one in 50 takes three times as long."""
    written = texts(0.05, 100, 4)
    took = seconds(written, CURVES[name], is_given=False, noise=0.12)
    assert simulation.fixed(written, CURVES[name], 0) / took > 0.95


@pytest.mark.parametrize("name", ("flat", "linear", "embedded pair", "Qwen pair"))
def test_timed_rounds_find_what_pays(name: str):
    written = texts(0.9, 300, 2)
    took = seconds(written, CURVES[name], is_given=False, noise=0.12)
    assert simulation.fastest(written, CURVES[name]) / took > 0.9


def test_it_notices_that_the_text_has_changed():
    written = texts(lambda place, end: 0.02 if end < 300 else 0.95, 900, 1)
    schedule, clock = make(CURVES["flat"])
    _, lengths = simulation.write(schedule, written, CURVES["flat"], clock)
    assert max(lengths[20:200]) == 1 and min(lengths[-20:-3]) >= 5


def test_trials_of_a_hopeless_draft_become_rare():
    schedule, clock = make(CURVES["linear"])
    _, lengths = simulation.write(schedule, texts(0.0, 3000, 1), CURVES["linear"], clock)
    trials = [i for i, length in enumerate(lengths) if length > 0]
    early, late = (sum(begin <= i < begin + 500 for i in trials) for begin in (0, 2500))
    assert early < 30 and 1 <= late < early / 2


def test_costs_that_no_draft_can_pay_are_never_tried():
    schedule, clock = make(CURVES["hopeless"])
    _, lengths = simulation.write(schedule, texts(1.0, 100, 1), CURVES["hopeless"], clock)
    assert not any(lengths)


@pytest.mark.parametrize(("num_tokens", "first"), ((80, 2), (100, 3), (1000, 7)))
def test_a_timed_call_begins_without_drafts_and_then_as_the_text_can_afford(num_tokens, first):
    schedule, clock = make(CURVES["flat"], is_given=False, start=7)
    assert simulation.write(schedule, texts(0.5, num_tokens, 1), CURVES["flat"], clock)[1][:2] == [0, first]


def test_plain_decoding_is_timed_again():
    """Else a first round of it that was disturbed would never be found out."""
    schedule, clock = make(CURVES["free drafts"], is_given=False)
    _, lengths = simulation.write(schedule, texts(0.5, 300, 1), CURVES["free drafts"], clock)
    again = [i for i, length in enumerate(lengths) if length == 0][1:]
    assert again[0] == FIRST_CHECK and again[1] == 2 * FIRST_CHECK


def test_rows_draft_alike_as_far_as_they_have_room():
    schedule, _ = make(CURVES["flat"], num_rows=3)
    rows = torch.arange(3)
    for _ in range(5):
        schedule.lengths(rows, torch.tensor([99, 99, 99]))
        schedule.update(rows, schedule.asked, schedule.asked)
    lengths = schedule.lengths(rows, torch.tensor([99, 1, 3])).tolist()
    assert lengths[0] > 3 and lengths[1:] == [0, 2]


def test_the_sum_over_the_rows_decides():
    """One row whose drafts are always kept next to one where they never are."""
    curve, rows = CURVES["linear"], torch.arange(2)

    def settled(kept: list[float], active: torch.Tensor) -> int:
        schedule, _ = make(curve, num_rows=2)
        for _ in range(40):
            asked = schedule.lengths(rows, torch.tensor([999, 999]))
            schedule.update(rows, asked, (asked * torch.tensor(kept)).long())
        return int(schedule.lengths(active, torch.tensor([999] * len(active))).max())

    assert settled([1, 1], rows) > settled([1, 0], rows)
    assert settled([1, 0], torch.tensor([0])) > settled([1, 0], torch.tensor([1]))  # the other has ended


def test_it_is_a_function_of_what_was_kept():
    runs = [simulation.write(make(CURVES["flat"])[0], texts(0.7, 200, 1), CURVES["flat"])[1] for _ in range(2)]
    assert runs[0] == runs[1] and len(set(runs[0])) > 2


def test_what_was_drafted_behind_a_rejection_decides_nothing():
    """Seeded rows meet those random numbers again."""
    lengths = []
    for num_drafted in (3, 4):
        schedule, _ = make(CURVES["flat"])
        rows = torch.tensor([0])
        for _ in range(9):
            asked = schedule.lengths(rows, torch.tensor([99]))
            schedule.update(rows, asked.clamp_max(num_drafted), torch.tensor([1]))
        lengths.append(int(asked))
    assert lengths[0] == lengths[1]


def test_when_rows_have_left_the_batch_costs_are_learnt_anew():
    now = [0.0]
    schedule = AutoSchedule(2, 5, clock=lambda: now[0])
    lengths = []
    for rows in [torch.arange(2)] * 40 + [torch.tensor([1])] * FIRST_CHECK:
        asked = schedule.lengths(rows, torch.full((len(rows),), 999))
        if len(rows) == 1 and not lengths:
            assert max(map(len, schedule.measured.rounds)) == 1
        now[0] += len(rows) * CURVES["free drafts"].round(int(asked.max()))
        schedule.update(rows, asked, asked)
        lengths += [int(asked.max())] * (len(rows) == 1)
    schedule.lengths(rows, torch.tensor([999]))
    assert 0 in [*lengths, int(schedule.asked)], "plain decoding is timed soon"


@pytest.mark.parametrize("is_given", (True, False))
def test_rows_of_two_tokens_leave_no_room_for_a_first_trial(is_given: bool):
    """One after another; a later row then has room."""
    schedule, clock = make(CURVES["flat"], is_given, num_rows=4)
    for row, remaining in enumerate((1, 1, 1, 30)):
        asked = schedule.lengths(torch.tensor([row]), torch.tensor([remaining]))
        clock(1.0)
        schedule.update(torch.tensor([row]), asked, asked)
    assert int(asked) > 0
