"""Blocks to verify, and what holds the fused kernels to the reference; on the GPU where there is one."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import reference
import torch
from torch import Tensor


pytest.importorskip("triton", reason="the kernels need the package triton")

from cactus_hf.acceptance import AcceptanceRule, Cactus, Mixture, SpeculativeSampling
from cactus_hf.bounded_rules import Lenience
from cactus_hf.heuristic_rules import TopK, TypicalAcceptance
from cactus_hf.kernels.verify import verify_block as fused
from cactus_hf.parameters import move_rule
from cactus_hf.probabilities import Normaliser
from cactus_hf.verification import Verification, verify_block


INF = math.inf
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RULES = [
    Cactus(0.0),
    Cactus([0.0, 1e-6, 0.3, INF]),
    SpeculativeSampling(),
    TypicalAcceptance(),
    TypicalAcceptance(recovery="sample"),
    TopK([1, 2, 3, 9]),
    Mixture(0.4),
    Lenience(0.5),
    Cactus(0.2, divergence="reverse_kl", solver="exact"),
]
# The reference rounds its probabilities to float32, and sums up to 2,000 of them in another order.
ROUNDING = 1e-5


@dataclass
class Block:
    """Arguments of `verify_block`, of 4 sequences unless said otherwise."""

    target: Tensor
    tokens: Tensor
    draft: Tensor | None
    lengths: Tensor
    uniforms: Tensor
    draft_normaliser: Normaliser | None = None

    def arguments(self, rule: AcceptanceRule) -> tuple[Any, ...]:
        rule = move_rule(rule, DEVICE)
        return self.target, self.tokens, self.draft, rule, self.lengths, self.uniforms, self.draft_normaliser

    def change(self, **fields: Any) -> Block:
        return replace(self, **fields)


def random_block(seed: int, num_drafted: int, vocab_size: int, dtype: torch.dtype, size: int = 4) -> Block:
    """Ragged, a fifth of the target's tokens removed, drafts drawn from the draft's law."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(size, num_drafted + 1, vocab_size, generator=generator) * 2
    draft = (target[:, :num_drafted] + torch.randn(size, num_drafted, vocab_size, generator=generator)).to(dtype)
    is_removed = torch.rand(target.shape, generator=generator) < 0.2
    is_removed[..., 0] = False
    laws = draft.double().softmax(-1).flatten(0, 1)
    tokens = torch.multinomial(laws, 1, generator=generator) if num_drafted else torch.zeros(0, dtype=torch.long)
    return Block(
        target.masked_fill(is_removed, -INF).to(dtype).to(DEVICE),
        tokens.view(size, num_drafted).to(DEVICE),
        draft.to(DEVICE),
        torch.randint(num_drafted + 1, (size,), generator=generator).to(DEVICE),
        torch.rand(size, num_drafted + 1, generator=generator, dtype=torch.float64).to(DEVICE),
    )


def assert_agree(block: Block, rule: AcceptanceRule, tile: int = 64) -> Verification:
    """All fields are the reference's, but for what the uniforms leave open by rounding."""
    expected = verify_block(*block.arguments(rule))
    result = fused(*block.arguments(rule), tile=tile)
    assert torch.equal(result.bad_target, expected.bad_target)
    is_law = expected.bad_target < 0  # the other rows mean nothing
    for name, want, got in zip(expected._fields, expected, result, strict=True):
        if want is None or got is None:  # what budgets have found; the kernels serve none
            assert want is got, name
            continue
        assert got.dtype == want.dtype and got.shape == want.shape, name
        want, got = want[is_law], got[is_law]
        if name == "ball_kl":
            # Both divide by sums over V, rounded otherwise; a KL is no steeper than this in q here
            torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)
        elif name != "next_token":
            assert torch.equal(got, want), (name, got, want)
    for row in is_law.nonzero()[:, 0].tolist():
        assert_is_drawn(block, rule, row, expected, int(result.next_token[row]))
    return result


def assert_is_drawn(block: Block, rule: AcceptanceRule, row: int, result: Verification, token: int) -> None:
    """The token's weight is positive, and its share of [0, 1] under the exact law holds the uniform, or all but."""
    i, u = int(result.num_accepted[row]), float(block.uniforms[row, -1])
    q = block.target[row, i].double().softmax(-1).tolist()
    weights = q
    if i < int(result.draft_lengths[row]):
        n = int(block.tokens[row, i])
        p = [float(x == n) for x in range(len(q))]
        if block.draft is not None:
            p = block.draft[row, i].double().softmax(-1).tolist()
        weights = reference.residual(rule, q, p, n, row)
    assert weights[token] > 0, (row, token)
    below, up_to = sum(weights[:token]), sum(weights[: token + 1])
    assert below - ROUNDING <= u <= up_to + ROUNDING, (row, token, below, u, up_to)
