"""Normalisers and draws, and that no block of logits is ever copied."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cactus_hf import probabilities
from cactus_hf.acceptance import Cactus, SpeculativeSampling
from cactus_hf.probabilities import SCRATCH, draw, draw_from_logits, normalise
from cactus_hf.verification import verify_block


class Allocations(TorchDispatchMode):
    """The largest tensor, in numbers, that any operation gave with storage of its own."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {each.untyped_storage().data_ptr() for each in args if isinstance(each, torch.Tensor)}
        for each in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() not in known:
                self.largest = max(self.largest, each.numel())
        return result


def block(dtype: torch.dtype, vocab_size: int = 50_000) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    target = (3 * torch.randn(4, 6, vocab_size, generator=generator)).to(dtype)
    draft = (target[:, :5].float() + torch.randn(4, 5, vocab_size, generator=generator)).to(dtype)
    uniforms = torch.rand(4, 6, generator=generator, dtype=torch.float64)
    tokens = draw(draft.flatten(0, 1).float().softmax(-1), torch.rand(20, generator=generator)).view(4, 5)
    return target, draft, tokens, uniforms


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rule", [SpeculativeSampling(), Cactus(0.5)], ids=str)
def test_verification_copies_no_block(rule, dtype: torch.dtype) -> None:
    target, draft, tokens, uniforms = block(dtype)
    with Allocations() as seen:
        verify_block(target, tokens, draft, rule, torch.full((4,), 5), uniforms)
    one_row_each = 4 * target.shape[2]
    assert one_row_each <= seen.largest <= max(one_row_each, SCRATCH) < target.numel() / 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_normalising_a_few_rows_at_a_time(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = block(torch.float32, 300)[0].to(dtype)
    logits[0, 1, 5], logits[1, 2], logits[2, 3, 0] = torch.nan, -torch.inf, torch.inf
    whole = normalise(logits)
    monkeypatch.setattr(probabilities, "SCRATCH", 700)  # two rows
    parts = normalise(logits)
    for one, other in zip(whole, parts, strict=True):
        assert one.dtype == torch.float64 and one.shape == (4, 6)
        torch.testing.assert_close(one, other, equal_nan=True, rtol=1e-6, atol=0)
    assert (~whole.peak.isfinite()).nonzero().tolist() == [[0, 1], [1, 2], [2, 3]]
    expected = logits.double().logsumexp(-1)
    is_law = whole.peak.isfinite()
    torch.testing.assert_close((whole.peak + whole.total.log())[is_law], expected[is_law], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_logits_that_are_no_law_give_some_token(value: float) -> None:
    logits = torch.full((1, 7), value)
    tokens, normaliser = draw_from_logits(logits, torch.tensor([[0.9]], dtype=torch.float64))
    assert 0 <= int(tokens) < 7 and not normaliser.peak.isfinite()


def test_drawing_from_logits_also_normalises() -> None:
    logits, _, _, uniforms = block(torch.float32, 300)
    tokens, normaliser = draw_from_logits(logits[:, 0], uniforms[:, :1])
    assert torch.equal(tokens[:, 0], draw(logits[:, 0].softmax(-1, dtype=torch.float64), uniforms[:, 0]))
    expected = normalise(logits[:, :1])
    torch.testing.assert_close(normaliser.peak, expected.peak)
    torch.testing.assert_close(normaliser.total, expected.total, rtol=1e-6, atol=0)


@pytest.mark.parametrize("vocab_size", [1000, 1024, 1500])  # blocks that are filled, and not
def test_long_rows_are_drawn_from_alike(vocab_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = torch.rand(60, vocab_size, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    weights[weights < 0.9] = 0.0  # most of them, among these whole blocks of some rows
    weights[::3, :512] = 0.0
    weights[1::3, 512:] = 0.0
    uniforms = torch.rand(60, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    uniforms[:4] = torch.tensor([0.0, 0.0, 1 - 2**-53, 1 - 2**-53], dtype=torch.float64)
    expected = draw(weights, uniforms)
    monkeypatch.setattr(probabilities, "MOST_AT_ONCE", 10)
    got = draw(weights, uniforms)
    assert torch.equal(got, expected) and (weights.gather(1, got[:, None]) > 0).all()
    whole_row = torch.linspace(0, 1 - 2**-53, 5000, dtype=torch.float64)
    counts = draw(weights[:1].expand(5000, -1), whole_row).bincount(minlength=vocab_size) / 5000
    assert (counts - weights[0] / weights[0].sum()).abs().max() < 1e-3


def test_the_drafts_own_normaliser_decides_alike() -> None:
    target, draft, tokens, uniforms = block(torch.float32, 300)
    lengths = torch.tensor([5, 3, 0, 5])
    arguments = (target, tokens, draft, Cactus(0.5), lengths, uniforms)
    for own, other in zip(verify_block(*arguments, normalise(draft)), verify_block(*arguments), strict=True):
        torch.testing.assert_close(own, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_below_the_normal_numbers_are_0(dtype: torch.dtype) -> None:
    """An exp that is not a normal number takes a CPU up to 30 times as long; a law has none of them to lose."""
    least = torch.finfo(dtype).tiny
    logits = torch.cat([torch.linspace(0, -2e3, 5000, dtype=dtype), torch.tensor([-torch.inf], dtype=dtype)])
    weights = probabilities._weights(logits[None], torch.zeros(1, 1, dtype=dtype))[0]
    is_kept = weights > 0
    assert torch.equal(is_kept, is_kept.cummin(0).values)  # they fall
    torch.testing.assert_close(weights[is_kept], logits[is_kept].exp())
    assert logits[is_kept].min().exp() >= least and logits[~is_kept].max().exp() < 2 * least
    none = torch.full((1, 3), torch.nan, dtype=dtype)
    assert probabilities._weights(none, none[:, :1]).isnan().all()
