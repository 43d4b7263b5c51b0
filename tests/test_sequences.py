from __future__ import annotations

import torch

from cactus_hf.sequences import Sequences


def make() -> Sequences:
    prompt = torch.tensor([[0, 0, 5], [6, 7, 8]])
    return Sequences(prompt, padding=torch.tensor([2, 0]), max_length=7, pad_token_id=0)


def test_rows_grow_at_their_own_speed():
    rows = make()
    rows.write(0, torch.tensor([[10, 11, 12], [20, 21, 22]]))
    assert rows.output().tolist() == [[0, 0, 5], [6, 7, 8]], "what is written is not committed"
    rows.commit(torch.tensor([[10, 11, 12], [20, 21, 22]]), torch.tensor([1, 3]))
    assert rows.output().tolist() == [[0, 0, 5, 10, 0, 0], [6, 7, 8, 20, 21, 22]]
    assert rows.remaining().tolist() == [3, 1]
    assert rows.slots().tolist() == [2, 6] and rows.position().tolist() == [2, 6]
    assert rows.read(-1, 1).tolist() == [[10], [22]]


def test_positions_do_not_count_padding():
    rows = make()
    assert rows.slots().tolist() == [1, 3]
    assert rows.slots(-1).tolist() == [0, 2]


def test_rows_of_one_length_go_together():
    rows = make()
    assert [(length, index.tolist()) for length, index in rows.by_length()] == [(3, [0, 1])]
    rows.write(0, torch.tensor([[10, 11], [20, 21]]))
    rows.commit(torch.tensor([[10, 11], [20, 21]]), torch.tensor([2, 1]))
    assert [(length, index.tolist()) for length, index in rows.by_length()] == [(4, [1]), (5, [0])]


def test_room_is_made_as_it_is_needed():
    rows = Sequences(torch.tensor([[1]]), torch.tensor([0]), max_length=2**31, pad_token_id=0)
    sizes = set()
    for step in range(300):
        rows.write(0, torch.tensor([[step]]))
        rows.commit(torch.tensor([[step]]), torch.tensor([1]))
        sizes.add(rows.tokens.shape[1])
    assert rows.output()[0, 1:].tolist() == list(range(300)) == rows.text[0, 1:301].tolist()
    assert len(sizes) < 20 and max(sizes) < 460


def test_rows_that_left_stay_in_the_output():
    rows = make()
    rows.write(0, torch.tensor([[10], [20]]))
    rows.commit(torch.tensor([[10], [20]]), torch.tensor([1, 1]))
    rows.keep(torch.tensor([1]))
    rows.write(0, torch.tensor([[21, 22]]))
    rows.commit(torch.tensor([[21, 22]]), torch.tensor([2]))
    assert rows.rows.tolist() == [1]
    assert rows.output().tolist() == [[0, 0, 5, 10, 0, 0], [6, 7, 8, 20, 21, 22]]


def test_rows_near_their_end_have_room_for_the_drafts_of_others():
    rows = make()
    rows.write(0, torch.tensor([[1, 1, 1], [2, 2, 2]]))
    rows.commit(torch.tensor([[1, 1, 1], [2, 2, 2]]), torch.tensor([3, 0]))  # row 0 may get one more, row 1 four
    rows.write(0, torch.tensor([[3] * 4, [4] * 4]))
    rows.commit(torch.tensor([[3] * 4, [4] * 4]), torch.tensor([1, 4]))
    assert rows.output().tolist() == [[0, 0, 5, 1, 1, 1, 3], [6, 7, 8, 4, 4, 4, 4]]


def test_the_host_has_its_own_copy_of_the_text():
    rows = make()
    rows.write(0, torch.tensor([[10], [20]]))
    rows.commit(torch.tensor([[10], [20]]), torch.tensor([1, 1]))
    rows.write(0, torch.tensor([[11], [21]]))  # drafts, which may be on another device
    assert rows.text[:, :4].tolist() == [[0, 0, 5, 10], [6, 7, 8, 20]]
    assert rows.text.data_ptr() != rows.tokens.data_ptr()
