from __future__ import annotations

import torch

from cactus_hf.outputs import TokenRows


def test_rows_are_returned_token_by_token():
    rows = TokenRows(3)
    values = torch.arange(24.0).view(3, 2, 4)
    rows.add(torch.arange(3), torch.zeros(3).long(), torch.tensor([1, 2, 1]), values)
    rows.add(torch.tensor([0, 2]), torch.tensor([1, 1]), torch.tensor([1, 2]), 100 + values[:2])
    first, second, third = rows.by_token()
    assert torch.equal(first, values[:, 0])
    assert torch.equal(second, torch.stack([100 + values[0, 0], values[1, 1], 100 + values[1, 0]]))
    assert torch.equal(third[:2], torch.zeros(2, 4)) and torch.equal(third[2], 100 + values[1, 1])
