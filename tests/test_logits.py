from __future__ import annotations

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from cactus_hf.logits import BlockProcessor, fit_vocabulary
from cactus_hf.sequences import Sequences


def sequences() -> Sequences:
    rows = Sequences(torch.tensor([[0, 3, 4], [5, 6, 7]]), torch.tensor([1, 0]), 12, 0)
    rows.write(0, torch.tensor([[8, 9], [10, 11]]))
    return rows


def expected(processors, rows: Sequences, logits: torch.Tensor) -> torch.Tensor:
    """Position by position on the exact prefix, as plain decoding would."""
    result = logits.clone()
    for b, row in enumerate(rows.rows.tolist()):
        for t in range(logits.shape[1]):
            scores = logits[b, t][None].clone()
            for processor in processors:
                scores = processor(rows.tokens[row : row + 1, : int(rows.length[row]) + t], scores)
            result[b, t] = scores[0]
    return result


@pytest.mark.parametrize(
    "processors",
    (
        [],
        [TemperatureLogitsWarper(0.7)],
        [TemperatureLogitsWarper(0.7), TopKLogitsWarper(5), TopPLogitsWarper(0.8), MinPLogitsWarper(0.1)],
        [RepetitionPenaltyLogitsProcessor(1.5)],
        [RepetitionPenaltyLogitsProcessor(1.5), TemperatureLogitsWarper(2.0)],
        [TemperatureLogitsWarper(2.0), RepetitionPenaltyLogitsProcessor(1.5), TopKLogitsWarper(3)],
        [lambda ids, scores: scores + ids.sum(1, keepdim=True)],
    ),
    ids=lambda processors: "-".join(type(p).__name__ for p in processors),
)
def test_a_block_is_processed_as_its_positions_one_by_one(processors):
    rows, logits = sequences(), torch.randn(2, 3, 13)
    processed = BlockProcessor(processors)(logits.clone(), rows)
    torch.testing.assert_close(processed, expected(processors, rows, logits))


def test_rows_of_different_lengths_keep_to_their_own_prefixes():
    rows, logits = sequences(), torch.randn(2, 2, 13)
    rows.commit(torch.tensor([[8, 9], [10, 11]]), torch.tensor([1, 2]))
    rows.write(0, torch.tensor([[5, 6], [7, 8]]))
    processors = [RepetitionPenaltyLogitsProcessor(1.5), lambda ids, scores: scores + ids.sum(1, keepdim=True)]
    torch.testing.assert_close(BlockProcessor(processors)(logits.clone(), rows), expected(processors, rows, logits))


def test_an_offset_moves_the_prefix():
    seen = []
    BlockProcessor([lambda ids, scores: seen.append(ids.tolist()) or scores])(torch.randn(2, 1, 13), sequences(), 1)
    assert seen == [[[0, 3, 4, 8], [5, 6, 7, 10]]]


def test_a_processor_finds_its_rows_where_they_were_after_others_have_left():
    bias = torch.randn(3, 13)
    rows = Sequences(torch.tensor([[1], [2], [3]]), torch.zeros(3).long(), 9, 0)
    rows.keep(torch.tensor([0, 2]))
    logits = torch.randn(2, 2, 13)
    processed = BlockProcessor([lambda ids, scores: scores + bias])(logits.clone(), rows)
    torch.testing.assert_close(processed, logits + bias[[0, 2], None])


def test_a_processor_must_keep_the_shape():
    with pytest.raises(ValueError, match="returned.*keep the shape"):
        BlockProcessor([lambda ids, scores: scores[:, :5]])(torch.randn(2, 1, 13), sequences())


def test_other_vocabularies():
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    assert fit_vocabulary(logits, 2).tolist() == [[1.0, 2.0]]
    assert fit_vocabulary(logits, 4).tolist() == [[1.0, 2.0, 3.0, -torch.inf]]
    assert fit_vocabulary(logits, 3) is logits or torch.equal(fit_vocabulary(logits, 3), logits)


@pytest.mark.parametrize("dtype", (torch.float64, torch.bfloat16))
def test_a_processor_may_return_another_precision(dtype):
    logits = torch.randn(2, 2, 13)
    processed = BlockProcessor([lambda ids, scores: (scores + 1).to(dtype)])(logits.clone(), sequences())
    torch.testing.assert_close(processed, (logits + 1).to(dtype).float())
