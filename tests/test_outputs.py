from __future__ import annotations

import torch

from cactus_hf.outputs import TokenRows


def test_rows_are_returned_token_by_token():
    rows = TokenRows(3)
    values = torch.arange(24.0).view(3, 2, 4)
    rows.add(torch.arange(3), torch.zeros(3).long(), torch.tensor([1, 2, 1]), values)
    rows.add(torch.tensor([0, 2]), torch.tensor([1, 1]), torch.tensor([1, 2]), 100 + values[:2])
    first, second, third = rows.by_token(torch.tensor([2, 2, 3]))
    assert torch.equal(first, values[:, 0])
    assert torch.equal(second, torch.stack([100 + values[0, 0], values[1, 1], 100 + values[1, 0]]))
    assert torch.equal(third[:2], torch.zeros(2, 4)) and torch.equal(third[2], 100 + values[1, 1])


def test_what_stands_behind_the_end_of_a_row_is_left_out():
    rows = TokenRows(2)
    rows.add(torch.arange(2), torch.zeros(2).long(), torch.tensor([3, 2]), torch.ones(2, 3, 4))
    first, second = rows.by_token(torch.tensor([1, 2]))
    assert first.all() and not second[0].any() and second[1].all()
