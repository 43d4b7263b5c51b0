"""Verification of a block: degenerate cases one by one, the slow twin, and bad input."""

from __future__ import annotations

import math
import warnings
from collections import Counter

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cactus_hf.acceptance import AcceptanceRule, Cactus, Mixture, SpeculativeSampling
from cactus_hf.bounded_rules import Lenience, Mentored
from cactus_hf.heuristic_rules import TopK, TypicalAcceptance
from cactus_hf.parameters import move_rule
from cactus_hf.probabilities import draw
from cactus_hf.verification import Verification, match_greedy, verify, verify_block


INF = math.inf
NAN = math.nan
DTYPES = (torch.float32, torch.float64)
ALMOST_1 = 1 - 2**-53
RULES = [
    Cactus(0.0),
    Cactus(0.5),
    Cactus(INF),
    SpeculativeSampling(),
    TypicalAcceptance(),
    TypicalAcceptance(recovery="sample"),
    TopK(2),
    Mixture(0.4),
    Lenience(0.5),
    Cactus(0.2, divergence="tv", solver="exact"),
    Cactus(0.2, divergence="js", solver="exact"),
    Mentored(0.1),
    Mentored(INF, "tv"),
]
RATIO_RULES = [rule for rule in RULES if not isinstance(rule, (TypicalAcceptance, TopK))]
BAD_ROWS = {"NaN": [NAN, 0.0, 0.0], "+inf": [INF, 0.0, 0.0], "all -inf": [-INF, -INF, -INF]}


def logits(*rows: list[float], dtype: torch.dtype = torch.float64) -> Tensor:
    """One sequence of rows of probabilities, as logits [1, len(rows), V]."""
    return torch.tensor([rows], dtype=dtype).log()


def assert_same(result: Verification, expected: Verification) -> None:
    for got, want in zip(result, expected, strict=True):
        assert got is want is None or torch.equal(got, want)


def verify_one(
    rule: AcceptanceRule,
    target: list[list[float]],
    token: int,
    draft: list[float] | None,
    u: float,
    next_u: float = 0.5,
    dtype: torch.dtype = torch.float64,
) -> Verification:
    """One sequence with one drafted token."""
    draft_logits = None if draft is None else logits(draft, dtype=dtype)
    uniforms = torch.tensor([[u, next_u]], dtype=torch.float64)
    return verify(logits(*target, dtype=dtype), torch.tensor([[token]]), draft_logits, rule, uniforms=uniforms)


def replacements(
    rule: AcceptanceRule, target: list[float], token: int, draft: list[float] | None, u: float
) -> set[int]:
    """Every token that can replace the drafted one, which `u` must reject."""
    found = set()
    for next_u in [0.0, ALMOST_1, *torch.linspace(0.0005, 0.9995, 200).tolist()]:
        result = verify_one(rule, [target, target], token, draft, u, next_u)
        assert result.num_accepted.item() == 0
        found.add(result.next_token.item())
    return found


@pytest.mark.parametrize("dtype", DTYPES)
class TestDegenerateCases:
    """Cases in which a formula gives 0/0, inf * 0 or no answer: for each the only right one, in both precisions."""

    target = [[0.0, 0.3, 0.7], [0.2, 0.3, 0.5]]

    @pytest.mark.parametrize("rule", [rule for rule in RULES if not isinstance(rule, Mixture)], ids=str)
    @pytest.mark.parametrize("draft", [[1.0, 0.0, 0.0], [0.5, 0.2, 0.3], [1e-30, 0.5, 0.5], [0.0, 0.5, 0.5], None])
    def test_q_is_0_rejects(self, rule: AcceptanceRule, draft: list[float] | None, dtype: torch.dtype) -> None:
        for next_u in (0.0, 0.5, ALMOST_1):
            result = verify_one(rule, self.target, 0, draft, u=0.0, next_u=next_u, dtype=dtype)
            assert result.num_accepted.item() == 0
            assert result.next_token.item() != 0
            assert result.ball_kl.item() == 0

    def test_q_is_0_draws_from_the_positive_part_of_q_less_p(self, dtype: torch.dtype) -> None:
        for rule in (Cactus(INF), Cactus(0.5), SpeculativeSampling()):
            draws = Counter(
                verify_one(rule, self.target, 0, [0.5, 0.4, 0.1], 0.0, next_u, dtype).next_token.item()
                for next_u in (0.0, 0.3, 0.7, ALMOST_1)
            )
            assert draws == {2: 4}  # q - p is -.5, -.1 and .6

    def test_q_is_0_is_kept_by_the_mixture_in_its_share(self, dtype: torch.dtype) -> None:
        for u, expected in ((0.59, 1), (0.61, 0)):
            result = verify_one(Mixture(0.4), self.target, 0, [0.5, 0.2, 0.3], u, dtype=dtype)
            assert result.num_accepted.item() == expected

    @pytest.mark.parametrize("rule", RULES, ids=str)
    @pytest.mark.parametrize("draft", [[1.0, 0.0, 0.0], [0.2, 0.8, 0.0], [0.0, 0.5, 0.5], None])
    def test_q_is_1_accepts(self, rule: AcceptanceRule, draft: list[float] | None, dtype: torch.dtype) -> None:
        result = verify_one(rule, [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]], 0, draft, ALMOST_1, dtype=dtype)
        assert result.num_accepted.item() == 1 and result.next_token.item() == 2
        assert result.ball_kl.item() == 0

    @pytest.mark.parametrize("rule", [Cactus(INF), Cactus(5.0)], ids=str)
    def test_gamma_is_1_accepts(self, rule: AcceptanceRule, dtype: torch.dtype) -> None:
        result = verify_one(rule, [[0.3, 0.7], [1.0, 0.0]], 0, [1.0, 0.0], ALMOST_1, dtype=dtype)
        assert result.num_accepted.item() == 1
        assert result.ball_kl.item() == pytest.approx(-math.log(0.3), rel=1e-6)
        assert result.is_boosted.item()

    def test_infinite_delta_keeps_what_float32_would_round_to_0(self, dtype: torch.dtype) -> None:
        target = torch.tensor([[[0.0, -200.0], [0.0, 0.0]]], dtype=dtype)
        draft = torch.tensor([[[-INF, 0.0]]], dtype=dtype)
        uniforms = torch.tensor([[ALMOST_1, 0.0]], dtype=torch.float64)
        result = verify(target, torch.tensor([[1]]), draft, Cactus(INF), uniforms=uniforms)
        assert result.num_accepted.item() == 1

    # Infinite budgets aside, h is positive where q is. Then it is p, and there is nothing to keep
    @pytest.mark.parametrize("rule", [rule for rule in RATIO_RULES if rule != Mentored(INF, "tv")], ids=str)
    def test_p_is_0_accepts_just_where_gamma_is_positive(self, rule: AcceptanceRule, dtype: torch.dtype) -> None:
        draft = [0.0, 0.5, 0.5]
        target = [[0.1, 0.9, 0.0], [0.2, 0.3, 0.5]]
        assert verify_one(rule, target, 0, draft, ALMOST_1, dtype=dtype).num_accepted.item() == 1
        assert verify_one(rule, self.target, 0, draft, 0.0, dtype=dtype).num_accepted.item() == 0

    @pytest.mark.parametrize("rule", RATIO_RULES, ids=str)
    @pytest.mark.parametrize("target", [[0.2, 0.3, 0.5], [0.3, 0.2, 0.5]])
    def test_gamma_as_large_as_p_accepts(self, rule: AcceptanceRule, target: list[float], dtype: torch.dtype) -> None:
        result = verify_one(rule, [target, target], 0, [0.2, 0.3, 0.5], ALMOST_1, dtype=dtype)
        assert result.num_accepted.item() == 1 and not result.is_boosted.item()

    @pytest.mark.parametrize("dtype_of_logits", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
    def test_draft_equal_to_target_accepts_all(self, dtype_of_logits: torch.dtype, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        target = (torch.randn(40, 9, 301, generator=generator, dtype=dtype) * 5).to(dtype_of_logits)
        tokens = torch.randint(301, (40, 8), generator=generator)
        uniforms = torch.full((40, 9), ALMOST_1, dtype=torch.float64)
        for rule in RATIO_RULES:
            result = verify(target, tokens, target[:, :8].clone(), rule, uniforms=uniforms)
            assert (result.num_accepted == 8).all() and (result.bad_target == -1).all()

    def test_residual_that_sums_to_0_draws_from_q(self, dtype: torch.dtype) -> None:
        # A one-hot target elsewhere gives q; a rule of which the residual is 0 everywhere must, too.
        class NoResidual(SpeculativeSampling):
            def residual(self, target_probs: Tensor, draft_probs: Tensor, drafted: object) -> Tensor:
                return torch.zeros_like(target_probs)

        for next_u, expected in ((0.0, 0), (0.19, 0), (0.21, 1), (0.51, 2), (ALMOST_1, 2)):
            result = verify_one(
                NoResidual(), [[0.2, 0.3, 0.5], [1.0, 0.0, 0.0]], 0, [0.8, 0.1, 0.1], 0.9, next_u, dtype
            )
            assert result.num_accepted.item() == 0 and result.next_token.item() == expected

    @pytest.mark.parametrize("rule", [SpeculativeSampling(), Cactus(0.0)], ids=str)
    def test_u_at_the_threshold_rejects(self, rule: AcceptanceRule, dtype: torch.dtype) -> None:
        target = torch.zeros(1, 2, 4, dtype=dtype)  # q = 1/4
        draft = torch.tensor([[[0.0, -INF, 0.0, -INF]]], dtype=dtype)  # p = 1/2
        for u, expected in ((0.5, 0), (math.nextafter(0.5, 0), 1)):
            uniforms = torch.tensor([[u, 0.0]], dtype=torch.float64)
            result = verify(target, torch.tensor([[0]]), draft, rule, uniforms=uniforms)
            assert result.num_accepted.item() == expected

    @pytest.mark.parametrize("draft", [[0.6, 0.2, 0.2], [1.0, 0.0, 0.0], None])
    @pytest.mark.parametrize("rule", [Cactus(0.0), Cactus(0.05), SpeculativeSampling(), Mixture(0.9)], ids=str)
    def test_rejected_token_is_not_drawn_again(
        self, rule: AcceptanceRule, draft: list[float] | None, dtype: torch.dtype
    ) -> None:
        assert 0 not in replacements(rule, [0.2, 0.3, 0.5], 0, draft, ALMOST_1)

    @pytest.mark.parametrize("rule", [Cactus(0.0), Cactus(1e-34), SpeculativeSampling(), Mixture(0.5)], ids=str)
    def test_rejected_token_is_not_drawn_again_where_p_and_q_differ_by_rounding(
        self, rule: AcceptanceRule, dtype: torch.dtype
    ) -> None:
        # The draft is the target with tokens 1 to 5 turned about and all logits shifted: p and q of token 0 differ by
        # rounding alone, which need not be the same in the test and in the residual. A uniform of 0 draws the first
        # token of the residual, however little it weighs.
        generator = torch.Generator().manual_seed(8)
        target = torch.randn(20_000, 2, 6, generator=generator, dtype=dtype)
        draft = target[:, :1, [0, 5, 4, 3, 2, 1]] + torch.randn(20_000, 1, 1, generator=generator, dtype=dtype)
        uniforms = torch.tensor([ALMOST_1, 0.0], dtype=torch.float64).expand(20_000, 2)
        result = verify(target, torch.zeros(20_000, 1, dtype=torch.long), draft, rule, uniforms=uniforms)
        is_rejected = result.num_accepted == 0
        assert is_rejected.sum() > 1000
        assert (result.next_token[is_rejected] != 0).all()

    @pytest.mark.parametrize("rule", [TypicalAcceptance(0.5, 5.0, "sample"), TopK(1)], ids=str)
    def test_rules_that_replace_from_q_may_draw_the_rejected_token(
        self, rule: AcceptanceRule, dtype: torch.dtype
    ) -> None:
        assert replacements(rule, [0.25, 0.3, 0.45], 0, [0.6, 0.2, 0.2], 0.0) == {0, 1, 2}

    @pytest.mark.parametrize("name", BAD_ROWS)
    @pytest.mark.parametrize("rule", RULES, ids=str)
    def test_bad_target_row_that_is_reached_raises(self, rule: AcceptanceRule, name: str, dtype: torch.dtype) -> None:
        for position in (0, 1, 2):
            target = torch.zeros(3, 3, 3, dtype=dtype)
            target[1, position] = torch.tensor(BAD_ROWS[name], dtype=dtype)
            # Every rule keeps the token in the rows before: q = p = 1/3, and it has the lowest id of three alike.
            with pytest.raises(ValueError, match=f"row 1 at position {position} .*NaN or .inf"):
                verify(target, torch.zeros(3, 2, dtype=torch.long), torch.zeros(3, 2, 3, dtype=dtype), rule)

    @pytest.mark.parametrize("name", BAD_ROWS)
    def test_bad_target_row_behind_a_rejection(self, name: str, dtype: torch.dtype) -> None:
        # NaN and +inf mean a broken model. An empty row is what a grammar gives behind a token that it forbids.
        target = torch.tensor([[[-INF, 0.0, 0.0], BAD_ROWS[name], [0.0, 0.0, 0.0]]], dtype=dtype)
        tokens, draft = torch.zeros(1, 2, dtype=torch.long), torch.zeros(1, 2, 3, dtype=dtype)
        if name == "all -inf":
            result = verify(target, tokens, draft, Cactus(1.0))
            assert result.num_accepted.item() == 0 and result.next_token.item() in (1, 2)
            assert result.bad_target.item() == -1
        else:
            with pytest.raises(ValueError, match="row 0 at position 1 "):
                verify(target, tokens, draft, Cactus(1.0))

    @pytest.mark.parametrize("name", BAD_ROWS)
    def test_bad_draft_row_drops_the_rest_of_its_drafts(self, name: str, dtype: torch.dtype) -> None:
        target = torch.zeros(2, 4, 3, dtype=dtype)
        target[0, 1] = torch.tensor([-INF, -INF, 0.0])
        draft = torch.zeros(2, 3, 3, dtype=dtype)
        draft[0, 1] = torch.tensor(BAD_ROWS[name])
        tokens = torch.zeros(2, 3, dtype=torch.long)
        with pytest.warns(RuntimeWarning, match="draft's logits") as caught:
            for seed in range(20):
                result = verify(target, tokens, draft, Cactus(0.5), generator=torch.Generator().manual_seed(seed))
                assert result.draft_lengths.tolist() == [1, 3] and result.num_accepted.tolist() == [1, 3]
                assert result.num_verified.tolist() == [1, 3]
                assert result.next_token[0] == 2
        assert len(caught) == 20

    def test_bad_draft_row_warns_once(self, dtype: torch.dtype) -> None:
        draft = torch.full((1, 1, 3), NAN, dtype=dtype)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            for _ in range(3):
                verify(torch.zeros(1, 2, 3, dtype=dtype), torch.tensor([[0]]), draft, Cactus(0.5))
        assert len(caught) == 1 and caught[0].filename == __file__


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_what_lies_beyond_the_draft_lengths_is_ignored(rule: AcceptanceRule, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    target, draft = torch.randn(2, 64, 5, 6, generator=generator, dtype=dtype)
    draft = draft[:, :4]
    tokens = torch.randint(6, (64, 4), generator=generator)
    lengths = torch.arange(64) % 5
    uniforms = torch.rand(64, 5, generator=generator, dtype=torch.float64)
    clean = verify(target, tokens, draft, rule, draft_lengths=lengths, uniforms=uniforms)
    clean_one_hot = verify(target, tokens, None, rule, draft_lengths=lengths, uniforms=uniforms)

    beyond = torch.arange(5) > lengths[:, None]
    for junk, token in ((NAN, -1), (INF, 10**9), (-INF, 6), (1e30, -(2**62))):
        dirty_target = target.masked_fill(beyond[..., None], junk)
        dirty_draft = draft.masked_fill((beyond[:, 1:])[..., None], junk)
        dirty_tokens = tokens.masked_fill(beyond[:, 1:], token)
        result = verify(
            dirty_target, dirty_tokens, dirty_draft, rule, draft_lengths=lengths.tolist(), uniforms=uniforms
        )
        assert_same(result, clean)
        result = verify(dirty_target, dirty_tokens, None, rule, draft_lengths=lengths, uniforms=uniforms)
        assert_same(result, clean_one_hot)
        if not isinstance(rule, TypicalAcceptance):  # any rule will do for greedy decoding
            result = match_greedy(dirty_target, dirty_tokens, lengths)
            assert_same(result, match_greedy(target, tokens, lengths))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    "rule", [*RULES, Cactus([0.0, 1e-6, 0.3, INF]), TopK([1, 2, 3, 9]), Mentored([0.0, 0.1, 1.0, INF])], ids=str
)
@pytest.mark.parametrize("has_draft_logits", [True, False])
def test_agrees_with_the_slow_twin(rule: AcceptanceRule, has_draft_logits: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    for m, vocab_size in ((0, 3), (1, 1), (1, 2), (2, 7), (3, 8), (5, 13)):
        for sharpness in (0.5, 3.0):
            target = torch.randn(4, m + 1, vocab_size, generator=generator, dtype=dtype) * sharpness
            draft = torch.randn(4, m, vocab_size, generator=generator, dtype=dtype) * sharpness
            is_removed = torch.rand(4, m + 1, vocab_size, generator=generator) < 0.2
            is_removed[..., 0] = False
            target = target.masked_fill(is_removed, -INF)
            tokens = torch.randint(vocab_size, (4, m), generator=generator)
            lengths = torch.randint(m + 1, (4,), generator=generator)
            uniforms = torch.rand(4, m + 1, generator=generator, dtype=torch.float64)
            if m == 5:
                draft[1, 2, 0] = NAN
            draft_logits = draft if has_draft_logits else None
            result = verify_block(target, tokens, draft_logits, rule, lengths, uniforms)
            for row in range(4):
                expected = reference.verify_row(
                    rule,
                    row,
                    target[row].tolist(),
                    tokens[row].tolist(),
                    draft[row].tolist() if has_draft_logits else None,
                    int(lengths[row]),
                    uniforms[row].tolist(),
                )
                for name, value in expected.items():
                    got = getattr(result, name)[row].tolist()
                    assert got == (pytest.approx(value, abs=1e-6, rel=1e-5) if name == "ball_kl" else value), name


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_rows_do_not_depend_on_their_neighbours(rule: AcceptanceRule) -> None:
    generator = torch.Generator().manual_seed(4)
    target, draft = torch.randn(2, 6, 4, 50, generator=generator)
    tokens, lengths = torch.randint(50, (6, 3), generator=generator), torch.tensor([0, 1, 2, 3, 3, 3])
    uniforms = torch.rand(6, 4, generator=generator, dtype=torch.float64)
    together = verify(target, tokens, draft[:, :3], rule, draft_lengths=lengths, uniforms=uniforms)
    for row in range(6):
        at = slice(row, row + 1)
        length = int(lengths[row])
        alone = verify(
            target[at, : length + 1],
            tokens[at, :length],
            draft[at, :length],
            rule,
            uniforms=torch.cat([uniforms[at, :length], uniforms[at, -1:]], dim=1),
        )
        for name in ("num_accepted", "next_token", "num_verified", "draft_lengths", "bad_target"):
            assert getattr(alone, name).item() == getattr(together, name)[row].item()
        assert torch.equal(alone.is_boosted, together.is_boosted[at, :length])
        torch.testing.assert_close(alone.ball_kl, together.ball_kl[at, :length])


@pytest.mark.parametrize("rule", [*RULES, Cactus([0.0, 0.1, INF]), TopK([1, 2, 3])], ids=str)
def test_the_loop_never_waits_for_the_device(rule: AcceptanceRule) -> None:
    # Tensors without data: whatever asks for a value (`item`, `bool`, `nonzero`, a mask as an index) raises.
    with torch.device("meta"):
        target, draft, uniforms = torch.zeros(3, 5, 7), torch.zeros(3, 4, 7), torch.zeros(3, 5, dtype=torch.float64)
        tokens, lengths = torch.zeros(3, 4, dtype=torch.long), torch.zeros(3, dtype=torch.long)
    for draft_logits in (draft, None):
        rule = move_rule(rule, torch.device("meta"))
        result = verify_block(target, tokens, draft_logits, rule, lengths, uniforms)
        assert result.next_token.shape == (3,) and result.next_token.device.type == "meta"
    assert match_greedy(target, tokens, lengths).next_token.shape == (3,)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_widened(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(9)
    target, draft = (torch.randn(2, 500, 4, 1000, generator=generator) * 4).to(dtype)
    tokens = draw(draft[:, :3].flatten(0, 1).double().softmax(-1), torch.rand(1500, generator=generator)).reshape(
        500, 3
    )
    uniforms = torch.rand(500, 4, generator=generator, dtype=torch.float64)
    for rule in RULES:
        result = verify(target, tokens, draft[:, :3], rule, uniforms=uniforms)
        wide = verify(target.float(), tokens, draft[:, :3].float(), rule, uniforms=uniforms)
        assert_same(result, wide)


def test_delta_0_is_speculative_sampling_exactly() -> None:
    generator = torch.Generator().manual_seed(5)
    target, draft = torch.randn(2, 2000, 4, 11, generator=generator)
    tokens = torch.randint(11, (2000, 3), generator=generator)
    uniforms = torch.rand(2000, 4, generator=generator, dtype=torch.float64)
    for draft_logits in (draft[:, :3], None):
        cactus = verify(target, tokens, draft_logits, Cactus(torch.zeros(2000)), uniforms=uniforms)
        lossless = verify(target, tokens, draft_logits, SpeculativeSampling(), uniforms=uniforms)
        assert_same(cactus, lossless)
        assert not cactus.is_boosted.any() and not cactus.ball_kl.any()


def test_a_generator_is_reproducible_and_the_global_one_is_the_default() -> None:
    target, tokens = torch.zeros(64, 3, 9), torch.zeros(64, 2, dtype=torch.long)
    results = [
        verify(target, tokens, None, Cactus(0.1), generator=torch.Generator().manual_seed(seed)).next_token
        for seed in (0, 0, 1)
    ]
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])
    torch.manual_seed(0)
    assert torch.equal(verify(target, tokens, None, Cactus(0.1)).next_token, results[0])


class TestDraw:
    @settings(deadline=None, max_examples=300)
    @given(
        st.lists(st.one_of(st.just(0.0), st.floats(0, 1e3)), min_size=1, max_size=9).filter(lambda x: sum(x) > 1e-300),
        st.one_of(st.sampled_from([0.0, ALMOST_1]), st.floats(0, ALMOST_1)),
    )
    def test_inverts_the_cumulative_sum_and_never_takes_a_zero(self, weights: list[float], u: float) -> None:
        index = draw(torch.tensor([weights], dtype=torch.float64), torch.tensor([u], dtype=torch.float64)).item()
        assert weights[index] > 0
        below, up_to = math.fsum(weights[:index]), math.fsum(weights[: index + 1])
        tolerance = 1e-12 * math.fsum(weights)
        assert below - tolerance <= u * math.fsum(weights) <= up_to + tolerance

    @pytest.mark.parametrize(
        "weights", [[0, 1, 0], [1, 0, 0], [0, 0, 1], [1e-300, 0, 0], [0, 1e-300, 0], [0, 1e-300, 1e300]]
    )
    def test_ends_of_the_unit_interval(self, weights: list[float]) -> None:
        for u in (0.0, 0.5, ALMOST_1, 1 - 2**-24):
            index = draw(torch.tensor([weights], dtype=torch.float64), torch.tensor([u], dtype=torch.float64))
            assert weights[index.item()] > 0

    def test_float32_uniforms_and_weights(self) -> None:
        weights = torch.tensor([[0.0, 0.25, 0.75, 0.0]]).expand(5, 4)
        assert draw(weights, torch.tensor([0.0, 0.2, 0.25, 0.3, 0.9999999])).tolist() == [1, 1, 2, 2, 2]

    def test_small_weights_of_a_long_row_are_not_lost(self) -> None:
        # A sum in float32 would stop growing at 2^24 times its terms.
        weights = torch.ones(1, 2**25, dtype=torch.float32)
        assert draw(weights, torch.tensor([0.999])).item() == pytest.approx(0.999 * 2**25, rel=1e-6)


class TestMatchGreedy:
    def test_keeps_matches_up_to_the_first_miss(self) -> None:
        target = torch.nn.functional.one_hot(torch.tensor([[1, 2, 3, 0]] * 5), 4).float()
        tokens = torch.tensor([[1, 2, 3], [0, 2, 3], [1, 0, 3], [1, 2, 0], [1, 2, 3]])
        result = match_greedy(target, tokens, torch.tensor([3, 3, 3, 3, 2]))
        assert result.num_accepted.tolist() == [3, 0, 1, 2, 2]
        assert result.next_token.tolist() == [0, 1, 2, 3, 3]
        assert result.num_verified.tolist() == [3, 1, 2, 3, 2]
        assert result.draft_lengths.tolist() == [3, 3, 3, 3, 2]
        assert result.bad_target.tolist() == [-1] * 5
        assert not result.is_boosted.any() and not result.ball_kl.any()

    @pytest.mark.parametrize("vocab_size", [2, 5, 64, 1000])
    def test_ties_go_to_the_lowest_id(self, vocab_size: int) -> None:
        target = torch.zeros(1, 2, vocab_size)
        target[0, 1, 0] = -1
        result = match_greedy(target, torch.tensor([[0]]), torch.tensor([1]))
        assert result.num_accepted.item() == 1 and result.next_token.item() == 1

    @pytest.mark.parametrize("name", BAD_ROWS)
    def test_bad_target_rows(self, name: str) -> None:
        target = torch.zeros(3, 3, 3)
        target[1, 1] = torch.tensor(BAD_ROWS[name])
        tokens = torch.tensor([[0, 0], [0, 0], [0, 0]])
        assert match_greedy(target, tokens, torch.tensor([2, 2, 2])).bad_target.tolist() == [-1, 1, -1]
        tokens[1, 0] = 2
        behind = -1 if name == "all -inf" else 1
        assert match_greedy(target, tokens, torch.tensor([2, 2, 2])).bad_target.tolist() == [-1, behind, -1]
        assert match_greedy(target, tokens, torch.tensor([2, 0, 2])).bad_target.tolist() == [-1, -1, -1]

    def test_no_draft(self) -> None:
        result = match_greedy(torch.eye(3)[None, :1], torch.zeros(1, 0, dtype=torch.long), torch.tensor([0]))
        assert result.num_accepted.item() == 0 and result.next_token.item() == 0 and result.num_verified.item() == 0


class TestBadInput:
    good = {
        "target_logits": torch.zeros(2, 4, 5),
        "draft_tokens": torch.zeros(2, 3, dtype=torch.long),
        "draft_logits": torch.zeros(2, 3, 5),
        "rule": Cactus(1.0),
    }

    def test_good_input_passes(self) -> None:
        verify(**self.good)
        verify(**{**self.good, "draft_tokens": self.good["draft_tokens"].to(torch.uint8)})
        verify(**{**self.good, "target_logits": torch.zeros(2, 4, 5).half(), "rule": Cactus([0.0, INF])})

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"target_logits": torch.zeros(2, 3, 5)}, r"here \[2, 4, V\].*got \[2, 3, 5\]"),
            ({"target_logits": torch.zeros(1, 4, 5)}, r"here \[2, 4, V\]"),
            ({"target_logits": torch.zeros(2, 4, 0)}, r"here \[2, 4, V\]"),
            ({"target_logits": torch.zeros(4, 5)}, "`target_logits` must be a floating tensor of three"),
            ({"target_logits": torch.zeros(2, 4, 5).long()}, "`target_logits` must be a floating tensor"),
            ({"target_logits": None}, "`target_logits` must be a floating tensor"),
            ({"draft_logits": torch.zeros(2, 3, 6)}, r"here \[2, 3, 5\]; got \[2, 3, 6\].*pad the smaller"),
            ({"draft_logits": torch.zeros(2, 4, 5)}, r"here \[2, 3, 5\]; got \[2, 4, 5\]"),
            ({"draft_logits": torch.zeros(2, 3)}, "`draft_logits` must be a floating tensor of three"),
            ({"draft_tokens": torch.zeros(2, 3)}, "`draft_tokens` must be an integer tensor"),
            ({"draft_tokens": torch.zeros(2, 3).bool()}, "`draft_tokens` must be an integer tensor"),
            ({"draft_tokens": [[0, 0, 0], [0, 0, 0]]}, "`draft_tokens` must be an integer tensor"),
            ({"draft_tokens": torch.zeros(6).long()}, "`draft_tokens` must be an integer tensor"),
            ({"draft_tokens": torch.tensor([[0, 0, 0], [0, 5, 0]])}, "from 0 to 4; got 5 in row 1 at position 1"),
            ({"draft_tokens": torch.tensor([[0, 0, -1], [0, 0, 0]])}, "got -1 in row 0 at position 2"),
            (
                {"draft_tokens": torch.zeros(2, 3, dtype=torch.long, device="meta")},
                "must be on one device, not cpu and meta",
            ),
            ({"rule": 1.0}, r"acceptance rule such as `Cactus\(1.0\)`; got 1.0"),
            ({"rule": Cactus}, "acceptance rule"),
            ({"rule": Cactus([1.0, 2.0, 3.0])}, "values for 3 rows, but there are 2"),
            ({"rule": Mixture([0.5])}, "values for 1 rows, but there are 2"),
            ({"draft_lengths": [3, 4]}, r"between 0 and m = 3; got \[3, 4\]"),
            ({"draft_lengths": [-1, 3]}, "between 0 and m = 3"),
            ({"draft_lengths": [3]}, "2 integers, one a row"),
            ({"draft_lengths": [1.0, 2.0]}, "2 integers, one a row"),
            ({"draft_lengths": torch.tensor([True, False])}, "2 integers, one a row"),
            ({"uniforms": torch.rand(2, 3)}, r"floating tensor of shape \[2, 4\]"),
            ({"uniforms": torch.zeros(2, 4).long()}, r"floating tensor of shape \[2, 4\]"),
            ({"uniforms": [0.5]}, r"floating tensor of shape \[2, 4\]"),
            ({"uniforms": torch.ones(2, 4)}, r"in \[0, 1\)"),
            ({"uniforms": torch.full((2, 4), -0.1)}, r"in \[0, 1\)"),
            ({"uniforms": torch.full((2, 4), NAN)}, r"in \[0, 1\)"),
            ({"uniforms": torch.rand(2, 4, device="meta")}, "`uniforms` must be on cpu"),
            ({"uniforms": torch.rand(2, 4), "generator": torch.Generator()}, "both given"),
        ],
    )
    def test_is_a_value_error(self, changes: dict, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            verify(**{**self.good, **changes})


def test_no_drafts_draw_from_the_target() -> None:
    target = torch.randn(7, 1, 5, generator=torch.Generator().manual_seed(6))
    uniforms = torch.rand(7, 1, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    for draft_logits in (torch.zeros(7, 0, 5), None):
        for rule in RULES:
            result = verify(target, torch.zeros(7, 0, dtype=torch.long), draft_logits, rule, uniforms=uniforms)
            expected = draw(target[:, 0].softmax(-1, dtype=torch.float64), uniforms[:, 0])
            assert torch.equal(result.next_token, expected)
            assert result.is_boosted.shape == result.ball_kl.shape == (7, 0)
            assert not result.num_accepted.any() and not result.num_verified.any()
