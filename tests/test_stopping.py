from __future__ import annotations

import torch
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteria

from cactus_hf.sequences import Sequences
from cactus_hf.stopping import Stopping


PROMPT = torch.tensor([[3]])  # one row
PROMPTS = torch.tensor([[3], [4], [5]])
BLOCK = torch.tensor([[5, 1, 5, 2], [1, 5, 5, 5], [5, 5, 5, 1]])


def test_ends_are_found_among_the_tokens_that_count():
    stopping = Stopping([EosTokenCriteria(torch.tensor([1, 2]))], PROMPT)
    count, has_ended = stopping.cut(BLOCK, torch.tensor([4, 3, 3]))
    assert count.tolist() == [2, 1, 3]
    assert has_ended.tolist() == [True, True, False]


def test_without_ends_nothing_is_cut():
    count, has_ended = Stopping([MaxLengthCriteria(9)], PROMPT).cut(BLOCK, torch.tensor([4, 3, 3]))
    assert count.tolist() == [4, 3, 3] and not has_ended.any()


def test_length_and_other_criteria_are_told_apart():
    stopping = Stopping([MaxLengthCriteria(9), EosTokenCriteria(1), Stops(8), MaxLengthCriteria(7)], PROMPT)
    assert stopping.max_length == 7
    assert [type(c) for c in stopping.others] == [Stops]


class Stops(StoppingCriteria):
    def __init__(self, token: int):
        self.token, self.lengths = token, []

    def __call__(self, input_ids, scores, **kwargs):
        self.lengths.append(input_ids.shape[1])
        return input_ids[:, -1] == self.token


def rows_of_different_lengths() -> Sequences:
    rows = Sequences(PROMPTS, torch.zeros(3).long(), 9, 0)
    rows.write(0, torch.tensor([[5], [6], [7]]))
    rows.commit(torch.tensor([[5], [6], [7]]), torch.tensor([0, 1, 0]))
    rows.write(0, torch.tensor([[5, 8, 5], [8, 5, 5], [5, 5, 5]]))
    return rows


def test_other_criteria_see_every_committed_prefix_up_to_the_stop():
    criterion = Stops(8)
    count, has_ended = Stopping([criterion], PROMPT).cut_by_criteria(
        rows_of_different_lengths(), torch.tensor([3, 1, 2]), torch.tensor([False] * 3)
    )
    assert count.tolist() == [2, 1, 2] and has_ended.tolist() == [True, True, False]
    assert criterion.lengths == [2, 3], "no row has more left to ask about"


def test_a_criterion_may_treat_rows_differently_or_all_alike():
    class OwnLimits(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return input_ids.shape[1] >= torch.tensor([3, 9, 2])

    class AtThree(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return input_ids.shape[1] >= 3

    for criterion, expected in ((OwnLimits(), [2, 3, 1]), (AtThree(), [2, 1, 2])):
        count, _ = Stopping([criterion], PROMPT).cut_by_criteria(
            rows_of_different_lengths(), torch.tensor([3, 3, 3]), torch.tensor([False] * 3)
        )
        assert count.tolist() == expected


def test_rows_that_are_not_asked_show_no_drafts():
    """They have no text of that length, so one of the others stands in their place."""
    shown = []

    def criterion(input_ids, scores, **kwargs):
        shown.append(input_ids.tolist())
        return torch.tensor([False, False, False])

    rows = rows_of_different_lengths()
    Stopping([criterion], PROMPTS).cut_by_criteria(rows, torch.tensor([1, 2, 2]), torch.tensor([False] * 3))
    assert shown == [
        [[3, 5], [3, 5], [5, 5]],
        [[4, 6, 8], [4, 6, 8], [5, 5, 5]],
        [[4, 6, 8, 5]] * 3,
    ]
