"""The fused kernels against the reference, equal for the same uniforms; in Triton's interpreter without a GPU."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_blocks import DEVICE, INF, RULES, Block, assert_agree, random_block
from torch import Tensor

import cactus_hf
import tiny
from cactus_hf import kernels
from cactus_hf.acceptance import AcceptanceRule, Cactus, Drafted, Mixture, SpeculativeSampling
from cactus_hf.bounded_rules import Lenience, Mentored
from cactus_hf.heuristic_rules import TopK, TypicalAcceptance
from cactus_hf.kernels.tiles import TILE
from cactus_hf.kernels.verify import verify_block as fused
from cactus_hf.parameters import select_rows
from cactus_hf.probabilities import normalise
from cactus_hf.verification import Verification, verify_block


pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # the interpreter's numpy, of NaN
NAN = math.nan
ALMOST_1 = 1 - 2**-53
SHAPES = [  # m, V, dtype; tiles are of 64 logits here
    (0, 3, torch.float32),
    (1, 1, torch.float32),
    (2, 63, torch.bfloat16),
    (2, 130, torch.float16),
    (5, 97, torch.bfloat16),
]


@pytest.mark.parametrize("has_draft", [True, False])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_agrees_with_the_reference(rule: AcceptanceRule, has_draft: bool) -> None:
    for seed, shape in enumerate(SHAPES if has_draft else SHAPES[2:4]):
        block = random_block(seed, *shape)
        assert_agree(block if has_draft else block.change(draft=None), rule)


@pytest.mark.parametrize("rule", [Cactus(0.3), TopK(5)], ids=str)
def test_whole_tiles(rule: AcceptanceRule) -> None:
    for seed, vocab_size in ((20, 2000), (21, TILE), (22, TILE + 1)):
        block = random_block(seed, 1, vocab_size, torch.float32, size=2)
        assert_agree(block.change(lengths=torch.ones_like(block.lengths)), rule, tile=TILE)


def rows(*probabilities: list[float]) -> Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log().float()


# One drafted token, number 0: the target's law of it, the draft's, and whether it is kept at the uniform `u`.
CORNERS = [
    ([0.0, 0.3, 0.7, 0.0], [1.0, 0.0, 0.0, 0.0], 0.0, False),  # q = 0
    ([0.0, 0.3, 0.7, 0.0], [0.5, 0.4, 0.1, 0.0], 0.0, False),
    ([0.0, 0.3, 0.7, 0.0], [0.0, 0.5, 0.5, 0.0], 0.0, False),  # p = 0 as well
    ([0.1, 0.9, 0.0, 0.0], [0.0, 0.5, 0.5, 0.0], ALMOST_1, True),  # p = 0 alone
    ([1.0, 0.0, 0.0, 0.0], [0.2, 0.8, 0.0, 0.0], ALMOST_1, True),  # q = 1
    ([0.2, 0.3, 0.1, 0.4], [0.2, 0.3, 0.1, 0.4], ALMOST_1, True),  # q = p
    ([0.25, 0.25, 0.25, 0.25], [0.5, 0.0, 0.5, 0.0], 0.5, False),  # u at the threshold
    ([0.25, 0.25, 0.25, 0.25], [0.5, 0.0, 0.5, 0.0], 0.5 - 2**-40, True),
]


@pytest.mark.parametrize("rule", [SpeculativeSampling(), Cactus(INF), TopK(3), Mixture(0.5)], ids=str)
def test_corners(rule: AcceptanceRule) -> None:
    size = len(CORNERS)
    target = torch.stack([rows(q, [0.2, 0.3, 0.5, 0.0]) for q, *_ in CORNERS]).to(DEVICE)
    draft = torch.stack([rows(p) for _, p, *_ in CORNERS]).to(DEVICE)
    uniforms = torch.tensor([[u, 0.5] for *_, u, _ in CORNERS], dtype=torch.float64, device=DEVICE)
    tokens = torch.zeros(size, 1, dtype=torch.long, device=DEVICE)
    block = Block(target, tokens, draft, tokens[:, 0] + 1, uniforms)
    for next_u, draft_logits in ((0.0, draft), (ALMOST_1, draft), (ALMOST_1, None)):
        uniforms[:, 1] = next_u
        result = assert_agree(block.change(draft=draft_logits), rule)
        if draft_logits is not None and rule == SpeculativeSampling():
            assert result.num_accepted.tolist() == [int(is_kept) for *_, is_kept in CORNERS]


@pytest.mark.parametrize("rule", [Cactus(0.3), TypicalAcceptance()], ids=str)
def test_bad_rows(rule: AcceptanceRule) -> None:
    """NaN, +inf and nothing but -inf at each position of either model, in a row of several tiles."""
    places = {NAN: 3, INF: 99, -INF: slice(None)}
    broken = [(model, i, value) for model in "qp" for i in range(3) for value in places]
    block = random_block(5, 2, 100, torch.float32, size=len(broken))
    block.target[:] = block.target.nan_to_num(neginf=0.0)
    block.lengths[:] = 2
    block.uniforms[::2, :2] = 0  # keeps more
    for row, (model, i, value) in enumerate(broken):
        if model == "q" or i < 2:
            (block.target if model == "q" else block.draft)[row, i, places[value]] = value
    # The reference also looks at rows behind drafts that were rejected; see `verify_block` of the kernels.
    reached = verify_block(*block.arguments(rule)).num_accepted == 2
    keep = torch.tensor([model == "p" or i < 2 for model, i, _ in broken], device=DEVICE) | reached
    assert_agree(
        Block(*(x[keep] for x in (block.target, block.tokens, block.draft, block.lengths, block.uniforms))), rule
    )


@pytest.mark.parametrize("rule", [Cactus(0.3), TypicalAcceptance(), TopK(2)], ids=str)
def test_what_lies_beyond_the_draft_lengths_is_ignored(rule: AcceptanceRule) -> None:
    block = random_block(7, 4, 70, torch.float32)
    block.lengths[:] = torch.arange(4)
    clean = fused(*block.arguments(rule), tile=64)
    beyond = torch.arange(5, device=DEVICE) > block.lengths[:, None]
    for junk, token in ((NAN, -1), (-INF, 10**9)):
        dirty = block.change(
            target=block.target.masked_fill(beyond[..., None], junk),
            draft=block.draft.masked_fill(beyond[:, 1:, None], junk),
            tokens=block.tokens.masked_fill(beyond[:, 1:], token),
        )
        for got, expected in zip(fused(*dirty.arguments(rule), tile=64), clean, strict=True):
            assert got is expected is None or torch.equal(got, expected)


def test_a_row_has_the_same_bits_in_any_batch() -> None:
    block, rule = random_block(8, 3, 150, torch.bfloat16), Cactus([0.1, 0.2, 0.3, 0.4])
    together = fused(*block.arguments(rule), tile=64)
    for row in range(4):
        at = slice(row, row + 1)
        alone = Block(block.target[at], block.tokens[at], block.draft[at], block.lengths[at], block.uniforms[at])
        result = fused(*alone.arguments(select_rows(rule, torch.tensor([row]))), tile=64)
        for got, expected in zip(result, together, strict=True):
            assert got is expected is None or torch.equal(got, expected[at])


@pytest.mark.parametrize("rule", [Cactus(1e-34), Mixture(0.5)], ids=str)
def test_rejected_token_is_not_drawn_again_where_p_and_q_differ_by_rounding(rule: AcceptanceRule) -> None:
    """As the test of that name of the reference, with seeds at which the scalars and the rows do disagree."""
    generator = torch.Generator().manual_seed(8)
    target = torch.randn(4000, 2, 6, generator=generator)
    draft = target[:, :1, [0, 5, 4, 3, 2, 1]] + torch.randn(4000, 1, 1, generator=generator)
    tokens = torch.zeros(4000, 1, dtype=torch.long)
    uniforms = torch.tensor([ALMOST_1, 0.0], dtype=torch.float64).repeat(4000, 1)
    block = Block(target, tokens, draft, tokens[:, 0] + 1, uniforms)
    rejected = verify_block(*block.arguments(rule)).num_accepted == 0
    # p_n in float32 as the residual has it: not above q_n, so that (q - p)+ at n would be more than 0
    q, p = (x[:, 0].softmax(-1)[:, 0] for x in (target, draft))
    chosen = (rejected & (p <= q)).nonzero()[:20, 0]
    assert len(chosen) == 20
    small = Block(*(x[chosen].to(DEVICE) for x in (target, tokens, draft, tokens[:, 0] + 1, uniforms)))
    result = fused(*small.arguments(rule))
    assert (result.num_accepted == 0).sum() >= 10
    assert (result.next_token[result.num_accepted == 0] != 0).all()


class TestDraftNormaliser:
    def test_agrees(self) -> None:
        block = random_block(9, 3, 100, torch.bfloat16)
        peak, total = normalise(block.draft)
        strided = type(normalise(block.draft))(peak.t().contiguous().t(), total)
        assert_agree(block.change(draft_normaliser=strided), Cactus(0.3))

    def test_spares_the_draft_s_rows_the_reading(self) -> None:
        block = random_block(10, 3, 100, torch.float32)
        given = block.change(draft_normaliser=normalise(block.draft))
        num_accepted = assert_agree(given, Cactus(0.3)).num_accepted
        # NaN in the rows of kept drafts, but at the drafted tokens
        for row in range(4):
            for i in range(int(num_accepted[row])):
                token = block.tokens[row, i]
                logit = block.draft[row, i, token].clone()
                block.draft[row, i] = NAN
                block.draft[row, i, token] = logit
        assert num_accepted.sum() > 0
        assert torch.equal(fused(*given.arguments(Cactus(0.3)), tile=64).num_accepted, num_accepted)


class TestLayouts:
    @pytest.mark.parametrize("layout", ["vocabulary first", "slices of a padded vocabulary", "one row for all"])
    def test_strides(self, layout: str) -> None:
        block = random_block(11, 2, 70, torch.float32)
        if layout == "vocabulary first":
            changed = {
                name: getattr(block, name).permute(2, 1, 0).contiguous().permute(2, 1, 0)
                for name in ("target", "draft")
            }
        elif layout == "one row for all":
            changed = {name: getattr(block, name)[:1].expand(4, -1, -1) for name in ("target", "draft")}
            changed["tokens"] = block.tokens[:1].expand(4, -1)
        else:
            padded = {
                name: torch.nn.functional.pad(getattr(block, name), (3, 5), value=NAN) for name in ("target", "draft")
            }
            changed = {name: value[..., 3:-5] for name, value in padded.items()}
        changed["uniforms"] = torch.cat([block.uniforms.float(), block.uniforms.float()], 1)[:, 2:5]
        for name, value in changed.items():
            assert name == "tokens" or not value.is_contiguous()
        assert_agree(block.change(**changed), Cactus(0.3))

    @pytest.mark.skipif(DEVICE.type == "cuda", reason="the file that stands for a large block is on the CPU")
    def test_offsets_beyond_31_bits(self, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Sequences 2^30 logits apart in a sparse file. Offsets in 32 bits would wrap to logits that are all alike."""
        from triton.runtime import interpreter

        # It would write the whole file, to copy the arguments back from where they are already.
        monkeypatch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *args: None)
        block = random_block(12, 1, 20, torch.bfloat16)
        block.lengths[:] = 1
        spread = {}
        for name in ("target", "draft"):
            values = getattr(block, name)
            size = 2**31 + 3 * 2**30 + 100
            file = torch.from_file(str(tmp_path / name), shared=True, size=size, dtype=torch.bfloat16)
            (tmp_path / name).unlink()  # 11 GB to anything that does not know of sparse files
            apart = file.as_strided(values.shape, (2**30, 20, 1), 2**31)
            spread[name] = apart.copy_(values)
        for rule in (Cactus(0.3), SpeculativeSampling()):
            result = fused(*block.change(**spread).arguments(rule), tile=64)
            for got, expected in zip(result, fused(*block.arguments(rule), tile=64), strict=True):
                assert got is expected is None or torch.equal(got, expected)


def test_a_residual_of_its_own_beats_inherited_factors() -> None:
    class Second(SpeculativeSampling):
        def residual(self, target_probs: Tensor, draft_probs: Tensor, drafted: Drafted) -> Tensor:
            return torch.zeros_like(target_probs).index_fill(1, torch.tensor([1], device=DEVICE), 1.0)

    block = random_block(13, 2, 9, torch.float32)
    block.uniforms[:, :2] = ALMOST_1
    block.lengths[:] = 2
    result = fused(*block.arguments(Second()), tile=64)
    is_rejected = result.num_accepted < 2
    assert is_rejected.any() and (result.next_token[is_rejected] == 1).all()


class TestChoice:
    def test_serves(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kernels, "_is_recent", lambda device: True)

        def logits(dtype: torch.dtype, is_cuda: bool = True) -> SimpleNamespace:
            return SimpleNamespace(dtype=dtype, is_cuda=is_cuda, device=torch.device("cuda"))

        half = logits(torch.bfloat16)
        assert kernels.serves(half, None, Cactus(1.0)) and kernels.serves(half, logits(torch.float32), TopK())
        assert not kernels.serves(torch.zeros(1, 1, 2), None, Cactus(1.0))
        assert not kernels.serves(logits(torch.float64), None, Cactus(1.0))
        assert not kernels.serves(half, logits(torch.float64), Cactus(1.0))

        assert kernels.serves(half, None, Cactus(1.0, solver="exact")) and kernels.serves(half, None, Lenience(0.5))
        assert not kernels.serves(half, None, Mentored(1.0))
        assert not kernels.serves(half, None, Cactus(kl_budget=1.0))
        monkeypatch.setattr(kernels, "_has_triton", lambda: False)
        assert not kernels.serves(half, None, Cactus(1.0))

    def test_verify_block_picks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kernels, "serves", lambda target_logits, draft_logits, rule: True)
        monkeypatch.setattr(kernels, "verify_block", lambda *arguments: len(arguments))
        block = random_block(14, 1, 5, torch.float32)
        assert verify_block(*block.arguments(Cactus(1.0))) == 7

    @pytest.mark.skipif(DEVICE.type == "cuda", reason="the tiny models are on the CPU")
    @pytest.mark.parametrize("rule", [Cactus(0.3), TypicalAcceptance()], ids=str)
    def test_generate_writes_the_same_text(self, rule: AcceptanceRule, monkeypatch: pytest.MonkeyPatch) -> None:
        target, draft = (tiny.vocabulary8(seed) for seed in (0, 1))
        prompts = tiny.ragged_prompts((1, 4, 3), vocab=8)
        options = {"do_sample": True, "max_new_tokens": 8, "eos_token_id": None, "pad_token_id": 0}
        options |= {"acceptance_rule": rule, "num_assistant_tokens": 3, "generator": [1, 2, 3]}
        cactus_hf.enable(target)
        try:
            expected = target.generate(**prompts.inputs, assistant_model=draft, **options)
            blocks = []

            def verify_fused(*block: Any) -> Verification:
                blocks.append(block)
                return fused(*block)

            monkeypatch.setattr(kernels, "serves", lambda target_logits, draft_logits, rule: True)
            monkeypatch.setattr(kernels, "verify_block", verify_fused)
            assert torch.equal(target.generate(**prompts.inputs, assistant_model=draft, **options), expected)
        finally:
            cactus_hf.disable(target)
        assert len(blocks) > 2 and any(normaliser is not None for *_, normaliser in blocks)

    def test_triton_is_not_imported_with_the_package(self) -> None:
        code = (
            "import sys, torch, cactus_hf; before = 'triton' in sys.modules; from cactus_hf import verify;"
            "verify(torch.zeros(1, 2, 3), torch.zeros(1, 1, dtype=int), None, cactus_hf.Cactus(1.0));"
            "assert before or 'triton' not in sys.modules"
        )
        subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
