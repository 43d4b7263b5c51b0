"""`--backend vllm` of `bench` and `eval`: both engines accept as many drafts of a pair, as their counts tell."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from cactus_hf import cli


pytest.importorskip("vllm.version", reason="tests/vllm/run")  # this folder has the name too

IN_PROCESS = '{"enforce_eager": true, "distributed_executor_backend": "uni"}'


@pytest.fixture
def names(pair: Path) -> list[str]:
    return ["--model", str(pair / "target"), "--assistant", str(pair / "draft")]


def test_bench_of_both_engines(names: list[str], tmp_path: Path) -> None:
    path = tmp_path / "found.jsonl"
    asked = ["--methods", "plain", "stock", "cactus", "mixture", "--deltas", "0", "1", "--num-assistant-tokens", "3"]
    asked += ["--num-prompts", "3", "--batch-sizes", "3", "--max-new-tokens", "80", "--repeats", "6"]
    asked += ["--backend", "transformers", "vllm", "--vllm-options", IN_PROCESS, "--json", str(path)]
    assert cli.main(["bench", *names, *asked]) == 0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = {(line["backend"], line["method"], line["delta"]): line for line in lines}
    assert len(found) == len(lines) == 10 and all(line["new_tokens"] == [240] * 6 for line in lines)
    for name, delta in (("cactus", 0), ("cactus", 1), ("mixture", None)):
        own, theirs = found["transformers", name, delta], found["vllm", name, delta]
        assert acceptances_agree(own, theirs), (name, delta, own["acceptance"], theirs["acceptance"])
    lossless, boosted = found["vllm", "cactus", 0], found["vllm", "cactus", 1]
    assert acceptances_agree(found["vllm", "stock", None], lossless) and not acceptances_agree(lossless, boosted)
    # A difference of sums that Cactus' rounds are in too
    assert abs(lossless["ball_kl"]) < 1e-9 and 0 < boosted["ball_kl"] < math.log1p(2)
    own = found["transformers", "cactus", 1]
    assert boosted["ball_kl"] == pytest.approx(own["ball_kl"], rel=0.15)  # some 600 drafts were checked in each


def acceptances_agree(one: dict, other: dict) -> bool:
    """To 4 sigma, as if drafts were kept independently of one another: wrong by chance once in 15,000 seeds."""
    share = (one["acceptance"] + other["acceptance"]) / 2
    error = math.sqrt(share * (1 - share) * (1 / one["verified"] + 1 / other["verified"]))
    assert error < 0.04
    return abs(one["acceptance"] - other["acceptance"]) < 4 * error


def test_eval_goes_on_with_the_other_engine(names: list[str], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("lm_eval", reason="the extra `eval` is not installed")
    data, summary = tmp_path / "gsm8k.jsonl", tmp_path / "summary.jsonl"
    rows = [{"question": f"{n} + {n}?", "answer": f"#### {2 * n}"} for n in range(4)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = ["--data", str(data), "--methods", "plain", "sps", "cactus:1", "--num-assistant-tokens", "3"]
    asked += ["--max-new-tokens", "40", "--batch-size", "3", "--output", str(tmp_path / "answers.jsonl")]
    asked += ["--no-chat-template", "--json", str(summary)]
    assert cli.main(["eval", *names, *asked]) == 0
    assert cli.main(["eval", *names, *asked, "--backend", "vllm", "--vllm-options", IN_PROCESS]) == 0
    lines = [json.loads(line) for line in summary.read_text().splitlines()]
    assert [(line["backend"], line["method"]) for line in lines] == [
        (backend, method) for backend in ("transformers", "vllm") for method in ("plain", "sps", "cactus:1")
    ]
    assert (
        lines[5]["accepted_length"] > lines[4]["accepted_length"] and lines[5]["ball_kl"] > 1e-3 > lines[4]["ball_kl"]
    )
    assert all(line["questions"] == 4 and line["mean_length"] <= 40 for line in lines)
