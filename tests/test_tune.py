"""`cactus-hf tune` on a tiny pair: what it prints, and that what it writes is honoured by `generate()`."""

from __future__ import annotations

import contextlib
import copy
import io
import json
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig

import cactus_hf
import tiny
from cactus_hf import cli
from cactus_hf.round_clock import Pass, RoundClock
from cactus_hf.round_costs import RoundCosts
from cactus_hf.speed import expected_tokens
from cactus_hf.tuning import Found, RoundSeconds, Setting, acceptance


@pytest.fixture(scope="module")
def folders(pair_folder: Path) -> list[str]:
    """Options that name a tiny pair with one token a byte."""
    return ["--model", str(pair_folder / "target"), "--assistant", str(pair_folder / "draft"), "--device", "cpu"]


def run(folders: list[str], *options: str) -> int:
    return cli.main(["tune", *folders, "--lengths", "1", "3", "--max-new-tokens", "24", "--repeats", "1", *options])


@pytest.fixture(scope="module")
def found(folders, tmp_path_factory) -> tuple[dict, Path]:
    """The JSON object of a run, and the folder with the config."""
    folder = tmp_path_factory.mktemp("config") / "new"
    options = ("--json", "--measure", "--deltas", "0", "0.5", "--batch-sizes", "1", "2", "--output", str(folder))
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert run(folders, *options) == 0
    assert out.getvalue().count("\n") == 1, "one object and nothing else"
    return json.loads(out.getvalue()), folder


def test_each_setting_is_predicted_and_measured(found):
    for size, part in zip((1, 2), found[0]["batch_sizes"], strict=True):
        assert part["batch_size"] == size and part["plain"] > 0 and part["auto"][0]["measured"] > 0
        cells = {(cell["length"], cell["delta"]): cell for cell in part["cells"]}
        assert cells.keys() == {(0, 0.0), (1, 0.0), (3, 0.0), (1, 0.5), (3, 0.5)}
        seconds = RoundCosts.from_dict({str(size): part["costs"]}).seconds(size)
        for chances in part["acceptance"]:
            assert all(0 < chance < 1 for chance in chances["by_position"]) and len(chances["by_position"]) == 3
            for length in (1, 3):
                cell = cells[length, chances["delta"]]
                assert cell["tokens_per_round"] == expected_tokens(chances["by_position"], length)
                assert cell["predicted"] == pytest.approx(size * cell["tokens_per_round"] / seconds[length])
                assert cell["measured"] > 0
        assert cells[0, 0.0]["predicted"] == pytest.approx(size / seconds[0])
        fastest = max(part["cells"], key=lambda cell: cell["measured"])
        assert part["best"] == {name: fastest[name] for name in ("length", "delta")}


def test_the_config_is_honoured(found):
    facts, folder = found
    config = GenerationConfig.from_pretrained(folder)
    first = facts["batch_sizes"][0]
    assert config.num_assistant_tokens_schedule == "auto" and config.cactus_delta == first["best"]["delta"]
    assert config.num_assistant_tokens == max(1, first["best"]["length"]) and config.temperature == 0.7
    assert config.speculation_costs == {str(part["batch_size"]): part["costs"] for part in facts["batch_sizes"]}
    target, draft = tiny.pair("llama", vocab=260, eps=0.1)
    target = cactus_hf.enable(copy.copy(target))
    config.update(max_new_tokens=20, min_new_tokens=20, eos_token_id=None, pad_token_id=0)
    texts = [
        target.generate(torch.tensor([[70, 71, 72]]), assistant_model=draft, generation_config=config, generator=[3])
        for _ in range(2)
    ]
    assert torch.equal(*texts) and texts[0].shape[1] == 23


def test_printed_table(folders, capsys):
    assert run(folders, "--deltas", "0", "0.5") == 0
    out, err = capsys.readouterr()
    assert not err, "no terminal, so no progress bars"
    lines = out.splitlines()
    head = next(i for i, line in enumerate(lines) if line.split()[:2] == ["m", "draft"])
    assert lines[head - 1].startswith("batch size 1: plain generate() ") and '"auto" at delta' in lines[head - 1]
    rows = lines[head + 1 : head + 4]
    assert [row.split()[0] for row in rows] == ["0", "1", "3"] and len({len(row) for row in [lines[head], *rows]}) == 1
    assert sum(row.count("(") for row in rows) == 3 and sum(row.count("*") for row in rows) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    (
        (["--lengths", "0"], "--lengths 0 alone"),
        (["--output", __file__], "cannot be a folder"),
        (["--pair", "x"], "--pair names both models"),
        (["--prompts", "no such file"], "no such file"),
        (["--max-new-tokens", "3"], "--max-new-tokens"),
    ),
)
def test_mistakes(folders, options, words, capsys):
    assert run(folders, *options) == 2
    assert words in capsys.readouterr().err


def test_rounds_are_told_from_prompts():
    """Two rows; the prompts are as wide as a block of drafts."""
    clock = RoundClock(tiny.model("llama"), tiny.model("qwen2"), torch.device("cpu"))
    target, draft = (lambda width, begin: Pass(True, 2, width, begin)), (lambda begin: Pass(False, 2, 1, begin))
    clock.passes = [
        target(3, 0.0), draft(1.0),  # the prompts
        draft(2.0), draft(3.0), target(3, 4.0), draft(6.0), draft(7.0), target(3, 8.5), draft(10.0),
        draft(11.0), target(3, 12.0),
    ]  # fmt: skip
    assert clock.rounds(2, 2) == [RoundSeconds(2.5, 1.5)]
    assert clock.rounds(1, 2) == clock.rounds(2, 1) == []


def test_rounds_without_drafts():
    clock = RoundClock(tiny.model("llama"), tiny.model("qwen2"), torch.device("cpu"))
    clock.passes = [Pass(True, 1, 1, 0.0), Pass(False, 1, 9, 1.0), *(Pass(True, 1, 1, float(i)) for i in (2, 3, 5))]
    assert clock.rounds(1, 0) == [RoundSeconds(0.0, 2.0)]


def test_prediction_and_costs_between_lengths():
    rounds = {0: RoundSeconds(0.0, 1.0), 1: RoundSeconds(0.1, 1.2), 3: RoundSeconds(0.3, 1.6)}
    found = Found(4, rounds, {0.0: [0.5, 0.5, 0.5], 1.0: [0.9, 0.9, 0.9]})
    assert found.predicted(Setting(1, 0.0)) == pytest.approx(4 * 1.5 / 1.3)
    assert found.costs() == {"draft": pytest.approx([0.1, 0.2, 0.3]), "verify": pytest.approx([1.0, 1.2, 1.4, 1.6])}
    assert found.ranked()[0] == found.fastest() == Setting(3, 1.0)
    found.measured = {Setting(1, 0.0): 9.0, Setting(3, 1.0): 8.0, Setting(None, 1.0): 99.0}
    assert found.fastest() == Setting(1, 0.0)


def test_acceptance_by_position():
    target, draft = tiny.pair("llama")
    output = cactus_hf.enable(copy.copy(target)).generate(
        torch.tensor([[5, 6, 7]]), assistant_model=draft, do_sample=False, cactus_delta=0.0, max_new_tokens=600,
        num_assistant_tokens=2, eos_token_id=None, pad_token_id=0, return_dict_in_generate=True,
    ).speculation  # fmt: skip
    first, second = output.accepted_by_position[0].tolist()
    found = acceptance([output], 2)  # with some weight on the guess
    assert found[0] == pytest.approx(first / int(output.rounds), abs=0.03)
    assert found[1] == pytest.approx(second / first, abs=0.06)


def test_infinite_delta_is_still_json(folders, capsys):
    assert run(folders, "--json", "--deltas", "inf") == 0
    found = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert found["settings"]["deltas"] == ["inf"] and found["batch_sizes"][0]["best"]["delta"] == "inf"


def test_more_tokens_than_the_target_holds(folders, capsys):
    assert run(folders, "--max-new-tokens", "100000") == 2
    assert "and the target holds" in capsys.readouterr().err
