from __future__ import annotations

import functools

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from cactus_hf.generation import processor_of_row
from cactus_hf.logits import BlockProcessor, fit_vocabulary
from cactus_hf.sequences import Sequences


def sequences() -> Sequences:
    rows = Sequences(torch.tensor([[0, 3, 4], [5, 6, 7]]), torch.tensor([1, 0]), 12, 0)
    rows.write(0, torch.tensor([[8, 9], [10, 11]]))
    return rows


def block_processor(processors, rows: int = 2) -> BlockProcessor:
    return BlockProcessor(processors, rows, functools.partial(processor_of_row, num_rows=rows, num_sequences=1))


def expected(processors, rows: Sequences, logits: torch.Tensor) -> torch.Tensor:
    """Position by position on the exact prefix, as plain decoding would."""
    result = logits.clone()
    for b in range(logits.shape[0]):
        for t in range(logits.shape[1]):
            row = logits[b, t][None].clone()
            for processor in processors:
                row = processor(rows.prefix(b, t), row)
            result[b, t] = row[0]
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
        [lambda ids, scores: scores + ids.sum()],
    ),
    ids=lambda processors: "-".join(type(p).__name__ for p in processors),
)
def test_a_block_is_processed_as_its_positions_one_by_one(processors):
    rows, logits = sequences(), torch.randn(2, 3, 13)
    processed = block_processor(processors)(logits.clone(), rows)
    torch.testing.assert_close(processed, expected(processors, rows, logits))


def test_an_offset_moves_the_prefix():
    rows = sequences()
    seen = []
    block_processor([lambda ids, scores: seen.append(ids.tolist()) or scores])(torch.randn(2, 1, 13), rows, offset=1)
    assert seen == [[[0, 3, 4, 8]], [[5, 6, 7, 10]]]


class Counting:
    def __init__(self):
        self.calls = 0

    def __call__(self, ids, scores):
        self.calls += 1
        return scores


def test_the_draft_has_copies_of_what_remembers():
    processor = Counting()
    target = block_processor([processor], rows=1)
    rows = Sequences(torch.tensor([[1, 2]]), torch.tensor([0]), 5, 0)
    target.for_draft()(torch.randn(1, 1, 13), rows)
    assert processor.calls == 0
    target(torch.randn(1, 1, 13), rows)
    assert processor.calls == 1


def test_rows_do_not_share_what_a_processor_remembers():
    processors = block_processor([Counting()]).by_row[0]
    assert processors[0] is not processors[1]


def test_other_vocabularies():
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    assert fit_vocabulary(logits, 2).tolist() == [[1.0, 2.0]]
    assert fit_vocabulary(logits, 4).tolist() == [[1.0, 2.0, 3.0, -torch.inf]]
    assert fit_vocabulary(logits, 3) is logits or torch.equal(fit_vocabulary(logits, 3), logits)
