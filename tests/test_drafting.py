"""A draft model's proposals, on a stand-in for the model that records what it is fed."""

from __future__ import annotations

import torch
from torch import Tensor

from cactus_hf.drafting import DraftModel, known
from cactus_hf.logits import BlockProcessor
from cactus_hf.sequences import Sequences


class Successor:
    """A model sure that token t is followed by t + 1; remembers tokens and positions it was fed."""

    def __init__(self, vocab: int = 20, certainty: float = 50.0):
        self.vocab, self.certainty, self.fed = vocab, certainty, []

    def score(self, tokens: Tensor, first: Tensor) -> Tensor:
        self.fed.append((tokens.tolist(), first.tolist()))
        return self.certainty * torch.nn.functional.one_hot((tokens + 1) % self.vocab, self.vocab).float()

    def keep(self, index: Tensor) -> None:
        pass


def make(model: Successor, target_size: int = 20, do_sample: bool = True, threshold: float = 0.0) -> DraftModel:
    return DraftModel(model, BlockProcessor([]), (target_size, model.vocab), do_sample, threshold)


def sequences() -> Sequences:
    return Sequences(torch.tensor([[0, 3], [5, 6]]), torch.tensor([1, 0]), 30, 0)


def commit(rows: Sequences, block: list[list[int]], counts: list[int]) -> None:
    rows.write(0, torch.tensor(block))
    rows.commit(torch.tensor(block), torch.tensor(counts))


def test_drafts_and_their_laws():
    model, rows = Successor(), sequences()
    commit(rows, [[4], [7]], [1, 1])
    drafts = make(model).propose(rows, torch.tensor([3, 3]), torch.rand(2, 3, dtype=torch.float64))
    assert drafts.tokens.tolist() == [[5, 6, 7], [8, 9, 10]] == rows.read(0, 3).tolist()
    assert drafts.logits.shape == (2, 3, 20) and drafts.lengths.tolist() == [3, 3]
    assert torch.equal(drafts.logits.argmax(-1), drafts.tokens)
    assert model.fed == [([[4], [7]], [1, 2]), ([[5], [8]], [2, 3]), ([[6], [9]], [3, 4])]


def test_greedy_drafts_have_no_law():
    rows = sequences()
    assert make(Successor(), do_sample=False).propose(rows, torch.tensor([1, 1]), torch.zeros(2, 1)).logits is None


def test_two_tokens_are_fed_where_all_drafts_were_kept_and_one_elsewhere():
    model, rows = Successor(), sequences()
    source = make(model)
    for kept, fed_next in (([2, 0], 2), ([1, 0], 1), ([2, 2], 2)):
        commit(rows, [[1], [1]], [1, 1])
        source.propose(rows, torch.tensor([2, 2]), torch.rand(2, 2, dtype=torch.float64))
        commit(rows, rows.read(0, 2).tolist(), kept)
        commit(rows, [[9], [9]], [1, 1])  # what follows the kept ones
        model.fed.clear()
        source.propose(rows, torch.tensor([2, 2]), torch.rand(2, 2, dtype=torch.float64))
        tokens, first = model.fed[0]
        assert tokens == rows.read(-fed_next, fed_next).tolist()
        assert first == rows.slots(-fed_next).tolist()
        source.cached = None  # as at the start of a call


def test_rows_may_want_fewer_drafts():
    drafts = make(Successor()).propose(sequences(), torch.tensor([0, 2]), torch.rand(2, 2, dtype=torch.float64))
    assert drafts.lengths.tolist() == [0, 2] and drafts.tokens.shape == (2, 2)


def test_an_unsure_token_is_kept_and_ends_the_row():
    sure = make(Successor(certainty=50.0), threshold=0.5)
    assert sure.propose(sequences(), torch.tensor([4, 4]), torch.rand(2, 4, dtype=torch.float64)).lengths.tolist() == [
        4,
        4,
    ]
    model = Successor(certainty=0.0)  # every token has probability 1/20
    drafts = make(model, threshold=0.5).propose(
        sequences(), torch.tensor([4, 4]), torch.rand(2, 4, dtype=torch.float64)
    )
    assert drafts.lengths.tolist() == [1, 1] and drafts.tokens.shape == (2, 1)
    assert len(model.fed) == 1, "no step is taken when every row has stopped"


def test_vocabularies_of_other_sizes():
    rows = sequences()
    larger = make(Successor(vocab=30), target_size=20)
    assert larger.propose(rows, torch.tensor([2, 2]), torch.rand(2, 2, dtype=torch.float64)).logits.shape == (2, 2, 20)
    smaller = make(Successor(vocab=5), target_size=20)
    drafts = smaller.propose(rows, torch.tensor([2, 2]), torch.rand(2, 2, dtype=torch.float64))
    assert (drafts.tokens < 5).all() and (drafts.logits[..., 5:] == -torch.inf).all()
    assert max(max(row) for row in smaller.model.fed[0][0]) < 5
    assert known(torch.tensor([3, 9]), 5).tolist() == [3, 4]
