"""The check that runs on a GPU, as far as it can be run without; what the kernels move, and how they compile."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from kernel_blocks import DEVICE

from cactus_hf.acceptance import Cactus, Mixture, SpeculativeSampling
from cactus_hf.host import stock_verification
from cactus_hf.kernels import check
from cactus_hf.kernels.accounting import bytes_moved
from cactus_hf.kernels.check import RULES, chance_of, check_agreement, check_laws, disagreements
from cactus_hf.kernels.roofline import Measurement, make_inputs, methods, table
from cactus_hf.kernels.verify import verify_block
from cactus_hf.probabilities import normalise


pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # the interpreter's numpy, of NaN
QWEN = 151_936


class TestBytes:
    """All that the kernels load and store, counted in the interpreter at the size of Qwen's vocabulary."""

    @pytest.mark.skipif(DEVICE.type == "cuda", reason="counted in Triton's interpreter")
    @pytest.mark.parametrize("num_rejected", [0, 1])
    @pytest.mark.parametrize("draft", ["logits", "normaliser", "tokens"])
    def test_as_counted(self, draft: str, num_rejected: int, monkeypatch: pytest.MonkeyPatch) -> None:
        from triton.runtime.interpreter import InterpreterBuilder

        moved = []

        def counted(method: Any) -> Any:
            def count(builder: Any, pointers: Any, *others: Any) -> Any:
                mask = next(x for x in others if x.data.dtype == bool)
                moved.append(int(mask.data.sum()) * pointers.get_element_ty().primitive_bitwidth // 8)
                return method(builder, pointers, *others)

            return count

        for name in ("create_masked_load", "create_masked_store"):
            monkeypatch.setattr(InterpreterBuilder, name, counted(getattr(InterpreterBuilder, name)))
        inputs = make_inputs(1, 1, QWEN, torch.bfloat16, DEVICE)
        inputs.uniforms[:, 0] = (1 - 2**-53) * num_rejected
        inputs.tokens[:] = 7
        inputs.target[..., 7] = inputs.target[:, 0].max()
        inputs.draft[..., 7] = inputs.draft.max() + 20
        given = normalise(inputs.draft) if draft == "normaliser" else None
        block = inputs if draft != "tokens" else inputs._replace(draft=None)
        result = verify_block(*block.arguments(SpeculativeSampling()), given)
        assert result.num_accepted.item() == 1 - num_rejected

        expected = bytes_moved(
            1, 1, QWEN, 2, num_rejected=num_rejected, has_draft=draft != "tokens", has_normaliser=given is not None
        )
        # What is not accounted for: scalars, in part read by each program
        assert expected <= sum(moved) <= expected + 0.02 * 2 * QWEN

    def test_at_most_26_and_14_vocabularies_in_bfloat16(self) -> None:
        most = [bytes_moved(1, 5, QWEN, 2, num_rejected=1, has_normaliser=given) / QWEN for given in (False, True)]
        assert most[0] < 24.5 and most[1] < 14.5
        assert bytes_moved(8, 5, QWEN, 2, num_rejected=8) == 8 * bytes_moved(1, 5, QWEN, 2, num_rejected=1)
        assert bytes_moved(1, 5, QWEN, 2, num_rejected=0) < bytes_moved(1, 5, QWEN, 2, num_rejected=1)


class TestChecks:
    def test_agreement(self) -> None:
        assert check_agreement(shapes=[(1, 2, 70), (1, 0, 70)], dtypes=["bfloat16"], tile=64) == []

    def test_disagreement_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        inputs = make_inputs(4, 2, 50, torch.float32, DEVICE)
        right = verify_block(*inputs.arguments(Cactus(0.3)), tile=64)
        wrong = {
            "num_accepted": right.num_accepted + 1,
            "next_token": (right.next_token + 25) % 50,
            "ball_kl": right.ball_kl + 1,
            "bad_target": right.bad_target + 1,
        }
        for name, value in wrong.items():
            monkeypatch.setattr(check, "verify_fused", lambda *_, n=name, v=value, **__: right._replace(**{n: v}))
            assert set(disagreements(inputs, Cactus(0.3))) == {name}

    @pytest.mark.parametrize("rule", [Cactus(0.3), Mixture(0.4)], ids=str)
    def test_laws(self, rule: Any) -> None:
        assert check_laws([rule], size=100, vocab_size=8, tile=16) == []

    def test_chance(self) -> None:
        law = torch.tensor([0.5, 0.3, 0.2, 0.0], dtype=torch.float64)
        assert chance_of(torch.tensor([500.0, 300.0, 200.0, 0.0]), law) == pytest.approx(1.0)
        assert chance_of(torch.tensor([600.0, 250.0, 150.0, 0.0]), law) < 1e-6
        assert chance_of(torch.tensor([500.0, 300.0, 199.0, 1.0]), law) == 0.0
        # 2 degrees of freedom: exp(-statistic / 2)
        statistic = torch.tensor(20**2 / 500 + 10**2 / 300 + 10**2 / 200)
        assert chance_of(torch.tensor([520.0, 290.0, 190.0, 0.0]), law) == pytest.approx((-statistic / 2).exp().item())

    def test_methods_run(self) -> None:
        inputs = make_inputs(2, 2, 40, torch.float32, DEVICE)
        runs = methods(inputs, tile=64)
        for run, _ in runs.values():
            run()
        assert [moved is None for _, moved in runs.values()] == [False, False, True, True]

    def test_stock_keeps_all_of_a_draft_that_is_the_target(self) -> None:
        inputs = make_inputs(1, 3, 40, torch.float32, DEVICE)
        tokens, num_kept = stock_verification(inputs.tokens, inputs.target[:, :3], inputs.target)
        assert num_kept == 3 and tokens.shape == (1, 4) and torch.equal(tokens[:, :3], inputs.tokens)

    def test_table(self) -> None:
        fused = Measurement("fused", 8, 0.05, 0.04, 0.06, 0.02, 8 * 24 * QWEN, 4e12)
        assert fused.of_copy == pytest.approx(8 * 24 * QWEN / 4e12 / 2e-5)
        stock = Measurement("transformers, row by row", 8, 5.0, 4.9, 5.1, None, None, 4e12)
        header, first, second = table([fused, stock], QWEN).splitlines()
        assert first.split() == ["8", "fused", "0.050", "(0.040-0.060)", "0.020", "24.0", "36%"]
        assert second.split()[-3:] == ["-", "-", "-"] and len(header) == len(first) == len(second)

    def test_needs_a_gpu(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert check.main([]) == 2
        assert "needs a CUDA device" in capsys.readouterr().err

    def test_reports_failures(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        one = Measurement("fused", 1, 0.05, 0.04, 0.06, 0.02, 24 * QWEN, 4e12)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
        monkeypatch.setattr(check, "check_laws", lambda: [])
        monkeypatch.setattr(check, "measure", lambda *_: [one])
        for failures in ([], ["next_token of a rule"]):
            monkeypatch.setattr(check, "check_agreement", lambda found=failures: found)
            assert check.main(["--batch-sizes", "1"]) == len(failures)
            out = capsys.readouterr().out
            assert '"device": "a GPU"' in out and ("FAILED: next_token of a rule" in out) == bool(failures)

    @pytest.mark.gpu
    def test_on_the_device(self) -> None:
        assert check_agreement() == [] and check_laws(RULES) == []
        inputs = make_inputs(8, 5, QWEN, torch.bfloat16, DEVICE)
        for rule in RULES:
            torch.cuda.set_sync_debug_mode("error")
            try:
                verify_block(*inputs.arguments(rule))
            finally:
                torch.cuda.set_sync_debug_mode("default")


COMPILE = """
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

class Stub:  # of a driver: kernels are compiled for a GPU that is not there
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)
    def get_current_device(self):
        return 0
    def get_current_stream(self, device):
        return 0

driver.set_active(Stub())
launch, compiled = JITFunction.run, {}

def compile_only(kernel, *args, warmup, **options):
    compiled[kernel.__name__] = launch(kernel, *args, warmup=True, **options).asm

JITFunction.run = compile_only

from cactus_hf import Cactus
from cactus_hf.kernels.verify import verify_block

target = torch.zeros(2, 6, 151_936, dtype=torch.bfloat16)
tokens = torch.zeros(2, 5, dtype=torch.long)
verify_block(target, tokens, target[:, :5], Cactus(0.5), tokens.sum(1), torch.rand(2, 6, dtype=torch.float64))
for name, asm in compiled.items():
    print(name, len(asm["cubin"]) > 0, asm["ptx"].count("ld.global.v4.b32"))
"""


def test_compiles_for_a_gpu(tmp_path: Any) -> None:
    """Machine code for compute capability 9.0 from the arguments of a real call, with loads of 16 bytes."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPILE], env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    lines = {
        name: (has_code, int(wide)) for name, has_code, wide in (line.split() for line in ran.stdout.splitlines())
    }
    assert set(lines) == {"_tile_sums", "_drafted", "_scan", "_next_tiles", "_draw"}
    assert all(has_code == "True" for has_code, _ in lines.values())
    assert lines["_tile_sums"][1] >= 2 and lines["_next_tiles"][1] >= 4  # 16 logits of bfloat16 a thread and row
