from __future__ import annotations

import pytest
import torch

from cactus_hf.randomness import GlobalUniforms, SeededUniforms, make_uniforms


CPU = torch.device("cpu")


def test_global_uniforms_follow_manual_seed():
    draws = []
    for _ in range(2):
        torch.manual_seed(1)
        draws.append(GlobalUniforms().draws(torch.arange(3), torch.zeros(3).long(), 4))
    assert torch.equal(*draws) and draws[0].shape == (3, 9) and draws[0].dtype == torch.float64


def test_seeded_uniforms_depend_on_seed_and_position_alone():
    uniforms = SeededUniforms(torch.tensor([5, 6, 7]))
    together = uniforms.draws(torch.tensor([0, 1, 2]), torch.tensor([10, 20, 30]), 3)
    alone = uniforms.draws(torch.tensor([1]), torch.tensor([20]), 3)
    assert torch.equal(together[1], alone[0])
    longer = uniforms.draws(torch.tensor([1]), torch.tensor([20]), 5)
    assert torch.equal(longer[0, :3], alone[0, :3]) and torch.equal(longer[0, 5:8], alone[0, 3:6])
    assert longer[0, -1] == alone[0, -1]


def test_seeded_uniforms_are_uniform_and_uncorrelated():
    """Means and correlations of 200,000 draws within 5 standard errors of those of independent uniforms."""
    seeds = torch.arange(1000)
    draws = SeededUniforms(seeds).draws(seeds, seeds % 7, 100)[:, :200].flatten()
    error = (1 / 12 / len(draws)) ** 0.5
    assert ((draws >= 0) & (draws < 1)).all()
    assert abs(draws.mean() - 0.5) < 5 * error
    counts = torch.histc(draws.float(), bins=50, min=0, max=1)
    assert ((counts - len(draws) / 50).abs() < 5 * (len(draws) / 50) ** 0.5).all()
    for lag in (1, 2, 100, 200):
        product = (draws[:-lag] - 0.5) * (draws[lag:] - 0.5) * 12
        assert abs(product.mean()) < 5 / len(product) ** 0.5


def test_a_generator_yields_the_seeds_of_the_rows():
    rows, position = torch.arange(2), torch.zeros(2).long()
    one, same, other = (
        make_uniforms(torch.Generator().manual_seed(seed), 2, 1, CPU).draws(rows, position, 3) for seed in (1, 1, 2)
    )
    assert torch.equal(one, same) and not torch.equal(one, other)
    assert not torch.equal(one[0], one[1])


def test_seeds_of_prompts_make_different_seeds_for_their_returned_rows():
    uniforms = make_uniforms([3, 4], 6, 3, CPU)
    draws = uniforms.draws(torch.arange(6), torch.zeros(6).long(), 2)
    assert len({tuple(row.tolist()) for row in draws}) == 6
    single = make_uniforms([3, 4], 2, 1, CPU).draws(torch.arange(2), torch.zeros(2).long(), 2)
    assert torch.equal(draws[[0, 3]], single)


def test_any_integer_is_a_seed():
    make_uniforms([2**70, -5, 0], 3, 1, CPU)


def test_wrong_number_of_seeds():
    with pytest.raises(ValueError, match="2 seeds for 3 rows"):
        make_uniforms([1, 2], 3, 1, CPU)
