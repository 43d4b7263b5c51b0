"""Warpers on the likeliest logits of a row give what transformers' processors give on all of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import generation as hf

from cactus_hf import warpers
from cactus_hf.warpers import Warpers


VOCAB = 4_000
RUNS = {
    "top-k": [hf.TopKLogitsWarper(20)],
    "the usual three": [hf.TemperatureLogitsWarper(0.6), hf.TopKLogitsWarper(20), hf.TopPLogitsWarper(0.95)],
    "min-p": [hf.TopKLogitsWarper(50), hf.MinPLogitsWarper(0.05), hf.TemperatureLogitsWarper(1.5)],
    "typical": [hf.TopKLogitsWarper(30), hf.TypicalLogitsWarper(0.9), hf.LogitNormalization()],
    "cutoffs": [hf.TopKLogitsWarper(30), hf.EpsilonLogitsWarper(0.01), hf.EtaLogitsWarper(0.01)],
    "two top-k": [hf.TopKLogitsWarper(30), hf.TopKLogitsWarper(5)],
}


def rows(seed: int = 0) -> Tensor:
    return 4 * torch.randn(15, VOCAB, generator=torch.Generator().manual_seed(seed))


def on_all(processors: list, logits: Tensor) -> Tensor:
    for processor in processors:
        logits = processor(None, logits)
    return logits


@pytest.mark.parametrize("processors", RUNS.values(), ids=RUNS)
def test_equal_to_all_processors_on_all_logits(processors: list, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, made = rows(), Warpers(processors)
    expected = on_all(processors, logits.clone())
    widths: list[int] = []
    stock = Warpers._on_all
    monkeypatch.setattr(Warpers, "_on_all", lambda self, flat: widths.append(flat.shape[1]) or stock(self, flat))
    processed = made(logits)
    assert torch.equal(processed == -torch.inf, expected == -torch.inf)
    torch.testing.assert_close(processed, expected, rtol=1e-6, atol=1e-6)
    assert widths == [made.num_likeliest] and made.num_likeliest < VOCAB / 32


def test_ties_beyond_what_was_looked_at_are_kept() -> None:
    processors = [hf.TopKLogitsWarper(5)]
    logits = torch.full((1, VOCAB), 1.0)  # all are among the five most likely
    assert torch.equal(Warpers(processors)(logits), logits)
    logits[..., 7] = 2.0
    assert torch.equal(Warpers(processors)(logits), on_all(processors, logits))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("processors", RUNS.values(), ids=RUNS)
def test_of_equal_logits_the_same_are_kept(processors: list, dtype: torch.dtype) -> None:
    """Logits of half precision have many equals; a top-p keeps some of them."""
    for seed in range(5):
        logits = rows(seed).to(dtype).float()
        assert torch.equal(Warpers(processors)(logits) == -torch.inf, on_all(processors, logits) == -torch.inf)


def test_ties_that_a_later_processor_cuts_are_counted_before() -> None:
    processors = [hf.TopKLogitsWarper(5), hf.TopPLogitsWarper(0.5)]
    logits = rows().div(3).round()  # some hundred tokens share the k-th place
    assert torch.equal(Warpers(processors)(logits), on_all(processors, logits))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_rows_that_are_no_laws_stay_so(value: float) -> None:
    logits = rows()
    logits[7] = value
    processed = Warpers(RUNS["top-k"])(logits)
    assert torch.isnan(processed[7]).any() if value != value else (processed[7] == value).any()
    others = torch.arange(15) != 7
    assert torch.equal(processed[others], on_all(RUNS["top-k"], rows())[others])


@pytest.mark.parametrize(
    "processors",
    [
        [hf.TopPLogitsWarper(0.9), hf.TopKLogitsWarper(5)],
        [hf.TopKLogitsWarper(5), hf.SuppressTokensLogitsProcessor([3])],
        [hf.TopKLogitsWarper(5, filter_value=-9.0)],
        [hf.TemperatureLogitsWarper(0.5)],
    ],
    ids=["top-p first", "by id", "not removed", "no top-k"],
)
def test_where_all_logits_matter(processors: list) -> None:
    assert Warpers(processors).num_likeliest is None
    assert torch.equal(Warpers(processors)(rows()), on_all(processors, rows()))


def test_small_vocabularies_are_no_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warpers.Warpers, "_on_likeliest", lambda self, flat: None)
    expected = Warpers(RUNS["top-k"])(rows()[..., :300])
    monkeypatch.undo()
    assert torch.equal(Warpers(RUNS["top-k"])(rows()[..., :300]), expected)
