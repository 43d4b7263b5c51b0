from __future__ import annotations

import numpy as np
import pytest
import torch

from cactus_hf.draft_length import DraftLength, LengthSchedule, make_schedule
from cactus_hf.round_costs import RoundCosts


ROWS = torch.tensor([0, 1])
PLENTY = torch.tensor([100, 100])


def test_constant():
    schedule = LengthSchedule(DraftLength(3), 2)
    schedule.update(ROWS, torch.tensor([3, 3]), torch.tensor([3, 0]))
    assert schedule.lengths(ROWS, PLENTY).tolist() == [3, 3]


def test_heuristic_goes_by_row():
    schedule = LengthSchedule(DraftLength(2, "heuristic"), 2)
    for accepted in ([2, 0], [4, 0], [1, 1]):
        schedule.update(ROWS, schedule.length.clone(), torch.tensor(accepted))
    assert schedule.lengths(ROWS, PLENTY).tolist() == [5, 3]  # 2 + 2 + 2 - 1; 2 - 1, at least 1, + 2
    assert schedule.lengths(torch.tensor([1]), torch.tensor([100])).tolist() == [3]


def test_no_more_than_the_row_has_left():
    schedule = LengthSchedule(DraftLength(5), 3)
    assert schedule.lengths(torch.arange(3), torch.tensor([1, 3, 9])).tolist() == [0, 2, 5]


def test_a_round_cut_short_by_the_end_does_not_count_as_a_failure_of_the_draft():
    schedule = LengthSchedule(DraftLength(5, "heuristic"), 1)
    schedule.update(torch.tensor([0]), torch.tensor([2]), torch.tensor([2]))
    assert schedule.length.tolist() == [7]


def test_integers_of_numpy():
    assert LengthSchedule(DraftLength(np.int32(3)), 2).lengths(ROWS, PLENTY).tolist() == [3, 3]


def test_sources_that_must_draft_do_so_with_any_acceptance():
    """Generators of transformers count on having seen every round, and draft no more than they were made for."""
    schedule, row, seen = make_schedule(DraftLength(3, "auto"), 1, needs_drafts=True), torch.tensor([0]), set()
    for num_kept in [0] * 20 + [9] * 20:
        asked = schedule.lengths(row, torch.tensor([100]))
        schedule.update(row, asked, asked.clamp_max(num_kept))
        seen.add(int(asked))
    assert seen <= {1, 2, 3}


def test_auto_drafts_no_more_than_the_costs_say():
    costs = RoundCosts((1,), ((0.01, 0.02),), ((1.0, 1.0, 1.0),))
    schedule, row = make_schedule(DraftLength(5, "auto", costs=costs), 1, needs_drafts=False), torch.tensor([0])
    for _ in range(9):
        asked = schedule.lengths(row, torch.tensor([100]))
        schedule.update(row, asked, asked)
    assert asked.tolist() == [2]


def test_processes_that_share_a_model_need_given_costs():
    with pytest.raises(ValueError, match="processes.*speculation_costs"):
        DraftLength(schedule="auto").check_timing(has_several_processes=True, has_seeds=False)
    costs = RoundCosts((1,), ((0.1,),), ((1.0, 1.0),))
    for length in (DraftLength(), DraftLength(schedule="auto", costs=costs)):
        length.check_timing(has_several_processes=True, has_seeds=True)


@pytest.mark.parametrize(
    "options",
    ({"num_tokens": 0}, {"num_tokens": True}, {"num_tokens": 2.0}, {"schedule": "x"}, {"confidence_threshold": -0.1}),
)
def test_bad_settings(options):
    with pytest.raises(ValueError, match="assistant"):
        DraftLength(**options)
