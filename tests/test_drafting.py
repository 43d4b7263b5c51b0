"""A draft model's proposals, on a stand-in for the model that records what it is fed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor

from cactus_hf.drafting import DraftModel, Drafts
from cactus_hf.logits import BlockProcessor
from cactus_hf.reading import Reader, SharedText
from cactus_hf.sequences import Sequences


class Successor:
    """A model sure that token t is followed by t + 1; remembers tokens and positions it was fed."""

    def __init__(self, vocab: int = 20, certainty: float = 50.0):
        self.vocab, self.certainty = vocab, certainty
        self.fed, self.prefilled = [], []

    def prefill(self, tokens: Tensor, padding: Tensor) -> tuple[Tensor, Successor]:
        self.prefilled.append([row[pads:] for row, pads in zip(tokens.tolist(), padding.tolist(), strict=True)])
        return self.logits(tokens)[:, -1], self

    def score(self, tokens: Tensor, first: Tensor) -> Tensor:
        self.fed.append((tokens.tolist(), first.tolist()))
        return self.logits(tokens)

    def logits(self, tokens: Tensor) -> Tensor:
        return self.certainty * torch.nn.functional.one_hot((tokens + 1) % self.vocab, self.vocab).float()

    def keep(self, index: Tensor) -> None:
        pass


def make(
    model: Successor,
    rows: Sequences,
    target_size: int = 20,
    do_sample: bool = True,
    threshold: float = 0.0,
    context: int | None = None,
) -> DraftModel:
    text = SharedText((target_size, model.vocab), torch.device("cpu"))
    return DraftModel(Reader(model.prefill, text, rows, context), BlockProcessor([]), do_sample, threshold)


def sequences() -> Sequences:
    return Sequences(torch.tensor([[0, 3], [5, 6]]), torch.tensor([1, 0]), 30, 0)


def commit(rows: Sequences, block: list[list[int]], counts: list[int]) -> None:
    rows.write(0, torch.tensor(block))
    rows.commit(torch.tensor(block), torch.tensor(counts))


def propose(source: DraftModel, rows: Sequences, lengths: list[int]) -> Drafts:
    uniforms = torch.rand(len(lengths), max(lengths), dtype=torch.float64)
    return source.propose(rows, torch.tensor(lengths), uniforms)


def test_drafts_and_their_laws():
    model, rows = Successor(), sequences()
    source = make(model, rows)
    commit(rows, [[4], [7]], [1, 1])
    drafts = propose(source, rows, [3, 3])
    assert drafts.tokens.tolist() == [[5, 6, 7], [8, 9, 10]]
    assert drafts.logits.shape == (2, 3, 20) and drafts.lengths.tolist() == [3, 3]
    assert torch.equal(drafts.logits.argmax(-1), drafts.tokens)
    assert model.prefilled == [[[3], [5, 6]]]
    assert model.fed == [([[4], [7]], [1, 2]), ([[5], [8]], [2, 3]), ([[6], [9]], [3, 4])]


def test_greedy_drafts_have_no_law():
    rows = sequences()
    assert propose(make(Successor(), rows, do_sample=False), rows, [1, 1]).logits is None


@pytest.mark.parametrize(("kept", "fed_next"), (([2, 0], 2), ([1, 0], 1), ([2, 2], 2)))
def test_two_tokens_are_fed_where_all_drafts_were_kept_and_one_elsewhere(kept, fed_next):
    model, rows = Successor(), sequences()
    source = make(model, rows)
    commit(rows, [[1], [1]], [1, 1])
    drafts = propose(source, rows, [2, 2])
    commit(rows, drafts.tokens.tolist(), kept)
    commit(rows, [[9], [9]], [1, 1])  # what follows the kept ones
    model.fed.clear()
    propose(source, rows, [2, 2])
    tokens, first = model.fed[0]
    assert tokens == rows.read(-fed_next, fed_next).tolist()
    assert first == rows.slots(-fed_next).tolist()


def test_rows_may_want_fewer_drafts():
    rows = sequences()
    drafts = propose(make(Successor(), rows), rows, [0, 2])
    assert drafts.lengths.tolist() == [0, 2] and drafts.tokens.shape == (2, 2)


def test_an_unsure_token_is_kept_and_ends_the_row():
    rows = sequences()
    sure = make(Successor(certainty=50.0), rows, threshold=0.5)
    assert propose(sure, rows, [4, 4]).lengths.tolist() == [4, 4]
    model, rows = Successor(certainty=0.0), sequences()  # every token has probability 1/20
    drafts = propose(make(model, rows, threshold=0.5), rows, [4, 4])
    assert drafts.lengths.tolist() == [1, 1] and drafts.tokens.shape == (2, 1)
    assert len(model.fed) == 1, "no step is taken when every row has stopped"


def test_vocabularies_of_other_sizes():
    rows = sequences()
    larger = make(Successor(vocab=30), rows, target_size=20)
    assert propose(larger, rows, [2, 2]).logits.shape == (2, 2, 20)
    rows = sequences()
    model = Successor(vocab=5)
    drafts = propose(make(model, rows, target_size=20), rows, [2, 2])
    assert (drafts.tokens < 5).all() and (drafts.logits[..., 5:] == -torch.inf).all()
    assert model.prefilled == [[[3], [4, 4]]], "tokens it lacks are read as its last"
    assert max(max(row) for row in model.fed[0][0]) < 5


def test_a_row_without_any_token_left_to_draft_drafts_none():
    class Only(LogitsProcessor):
        """Row 0 may go on with the tokens behind 17 only, which the draft lacks."""

        def __call__(self, input_ids, scores):
            scores[0, :17] = -torch.inf
            return scores

    rows = sequences()
    source = make(Successor(vocab=10), rows, target_size=20)
    source.processors = BlockProcessor([Only()])
    drafts = propose(source, rows, [2, 2])
    assert drafts.lengths.tolist() == [0, 2]


class TestContext:
    """Rows that outgrow the model are read anew from where the last part of their text begins."""

    def test_the_last_part_is_read(self):
        model = Successor(vocab=50)
        prompt = torch.arange(24).view(2, 12)
        rows = Sequences(prompt, torch.tensor([9, 0]), 60, 0)  # 3 and 12 tokens
        source = make(model, rows, target_size=50, context=8)
        assert model.prefilled == [[[9, 10, 11], [16, 17, 18, 19, 20, 21, 22, 23]]]
        commit(rows, [[30], [31]], [1, 1])
        drafts = propose(source, rows, [3, 3])  # rows of 4 and 13 tokens, 2 drafts of which are read
        assert drafts.tokens.tolist() == [[31, 32, 33], [32, 33, 34]]
        assert model.prefilled[1:] == [[[9, 10, 11, 30], [20, 21, 22, 23, 31]]]
        assert model.fed == [([[31], [32]], [4, 5]), ([[32], [33]], [5, 6])]
        commit(rows, [[31, 40], [41, 0]], [2, 1])
        model.fed.clear()
        propose(source, rows, [2, 2])
        assert model.fed[0] == ([[40], [41]], [5, 5]) and len(model.prefilled) == 2

    def test_where_it_begins_is_a_matter_of_the_row_alone(self):
        lengths = [3, 12, 30, 7]
        together, alone = {}, {}
        for rows_of, starts in ((lengths, together), *(([length], alone) for length in lengths)):
            model = Successor(vocab=50)
            width = max(rows_of)
            padding = width - torch.tensor(rows_of)
            rows = Sequences(torch.ones(len(rows_of), width, dtype=torch.long), padding, 90, 0)
            source = make(model, rows, target_size=50, context=8)
            for _ in range(6):
                commit(rows, [[2]] * len(rows_of), [1] * len(rows_of))
                propose(source, rows, [2] * len(rows_of))
                for length, start in zip(rows_of, source.reader.start.tolist(), strict=True):
                    starts.setdefault(length, []).append(start)
        assert together == alone and together[3][0] == 0 < together[3][-1]

    def test_positions_never_reach_the_context(self):
        for context in (1, 2, 3, 8):
            model, rows = Successor(), Sequences(torch.ones(1, 5, dtype=torch.long), torch.tensor([0]), 60, 0)
            source = make(model, rows, context=context)
            for kept in (1, 3, 1, 1, 2, 4, 1):
                commit(rows, [[2] * kept], [kept])
                drafts = propose(source, rows, [5])
                assert 1 <= drafts.tokens.shape[1] <= 5
            assert all(len(row) <= context for block in model.prefilled for row in block)
            assert all(first + len(tokens[0]) <= context for tokens, (first,) in model.fed)
