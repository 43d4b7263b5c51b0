"""`cactus-hf plot`: the pictures, their curves, and what it says where it cannot draw."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from cactus_hf import cli
from cactus_hf.plotting import theory


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(theory, "PAIRS", 3)
    monkeypatch.setattr(theory, "VOCAB_SIZE", 40)


def test_theory_writes_small_pictures(small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / "figures"
    assert cli.main(["plot", "theory", "--output", str(folder)]) == 0
    names = [folder / f"{name}.png" for name in ("gamma", "ball", "tradeoff")]
    assert capsys.readouterr().out.split() == [str(name) for name in names]
    assert sorted(folder.iterdir()) == sorted(names)
    for name in names:
        assert name.read_bytes().startswith(b"\x89PNG") and name.stat().st_size < 80_000


def test_no_rule_passes_the_limit(small: None) -> None:
    target, draft = theory.synthetic_laws(seed=1)
    limit = [theory.acceptance_and_kl(target, h, torch.minimum(h, draft)) for h in theory.best_laws(target, draft)]
    assert limit[0][0] == pytest.approx(0, abs=1e-12)
    for curve in theory.CURVES:
        for rule in curve.rules[::3]:
            kl, kept = theory.acceptance_and_kl(target, *theory.emission(target, draft, rule))
            for slope_kl, slope_kept in limit:
                assert not (kl < slope_kl - 1e-9 and kept > slope_kept + 1e-9), (curve.label, rule)


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["plot", "theory", "--output", str(tmp_path / "figures")]) == 2
    assert "pip install 'cactus_hf[plot]'" in capsys.readouterr().err
    assert not (tmp_path / "figures").exists()


def test_a_picture_is_to_be_named() -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["plot"])
    assert stop.value.code == 2
