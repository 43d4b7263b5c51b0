"""`--backend vllm` of `eval` and `bench` with a stand-in for vLLM; tests/vllm/test_backend.py has the real one."""

from __future__ import annotations

import copy
import importlib.machinery
import json
import sys
import time
import types
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import cactus_hf
import tiny
from cactus_hf import cli, vllm_backend
from cactus_hf.evaluation import running, vllm_answers
from cactus_hf.evaluation.methods import Method
from cactus_hf.measuring import Counts
from cactus_hf.vllm_backend import Engine, until_end


BALL_KL = 0.25


class StandIn:
    """An engine that writes the token 70 ("B") and keeps one draft a round."""

    engines: list[StandIn] = []

    def __init__(self, **options):
        self.options, self.requests, self.is_running = options, [], True
        self.checked = 0
        self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(shutdown=self.shutdown))
        assert not any(engine.is_running for engine in self.engines), "one at a time"
        self.engines.append(self)

    def shutdown(self):
        self.is_running = False

    def collective_rpc(self, name):
        assert name == "cactus_statistics"
        return [{"verified": self.checked, "ball_kl": BALL_KL}]

    def generate(self, prompts, params, use_tqdm):
        time.sleep(0.01)  # `eval` rounds times to tenths of a millisecond
        self.requests += zip(prompts, params, strict=True)
        outputs = []
        for each in params:
            metrics, num = None, each["max_tokens"]
            if "speculative_config" in self.options:
                drafted = [self.options["speculative_config"]["num_speculative_tokens"]] * (num // 2)
                self.checked += 2 * len(drafted)
                metrics = SimpleNamespace(per_step_drafted=drafted, per_step_accepted=[1] * len(drafted))
            output = SimpleNamespace(token_ids=[70] * num, spec_decode_metrics=metrics)
            outputs.append(SimpleNamespace(outputs=[output]))
        return outputs


@pytest.fixture
def engines(monkeypatch) -> list[StandIn]:
    module = types.ModuleType("vllm")
    module.__spec__ = importlib.machinery.ModuleSpec("vllm", None)
    module.LLM, module.SamplingParams, module.__version__ = StandIn, dict, "0.0"
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setattr(StandIn, "engines", [])
    monkeypatch.setattr(vllm_backend, "has_plugin", lambda: True)
    for name in ("VLLM_WORKER_MULTIPROC_METHOD", "VLLM_LOGGING_LEVEL"):
        monkeypatch.setenv(name, "set by the user")
    return StandIn.engines


@pytest.fixture
def pair(pair_folder: Path) -> list[str]:
    return ["--model", str(pair_folder / "target"), "--assistant", str(pair_folder / "draft")]


BENCH = ["--num-prompts", "2", "--batch-sizes", "2", "--max-new-tokens", "12", "--num-assistant-tokens", "3"]


def test_bench_of_vllm(engines, pair, pair_folder, tmp_path) -> None:
    path = tmp_path / "found.jsonl"
    asked = ["--methods", "plain", "stock", "cactus", "mixture", "--deltas", "0", "1", "--top-k", "5"]
    asked += ["--repeats", "2", "--backend", "vllm", "--vllm-options", '{"enforce_eager": true}', "--json", str(path)]
    assert cli.main(["bench", *pair, *BENCH, *asked]) == 0
    lines = {(line["method"], line["delta"]): line for line in map(json.loads, path.read_text().splitlines())}
    plain = lines.pop(("plain", None))
    assert plain["times_plain"] == 1 and plain["accepted_length"] is None
    assert list(lines) == [("stock", None), ("cactus", 0), ("cactus", 1), ("mixture", None)]
    for (method, _), line in lines.items():
        # Of 12 tokens the first belongs to no round, and the sixth round has room for one of its two
        assert (line["rounds"], line["accepted_length"], line["tokens_per_round"]) == (2 * 2 * 6, 1, 11 / 6)
        assert line["new_tokens"] == [24, 24] and line["efficiency"] is None and line["versions"]["vllm"] == "0.0"
        assert line["ball_kl"] == (pytest.approx(BALL_KL) if method == "cactus" else None)

    rules = [engine.options.get("additional_config") for engine in engines]
    assert rules == [None, None, {"cactus_hf": "cactus:0"}, {"cactus_hf": "mixture:0.5"}]
    for engine in engines:
        assert engine.options["model"] == str(pair_folder / "target") and engine.options["dtype"] == "float32"
        assert engine.options["enforce_eager"] and not engine.options["enable_prefix_caching"]
        assert not engine.is_running
    assert [("speculative_config" in engine.options) for engine in engines] == [False, True, True, True]
    assert engines[1].options["speculative_config"]["model"] == str(pair_folder / "draft")
    _, last = engines[2].requests[-1]
    sampling = {"temperature": 0.7, "top_k": 5, "top_p": 1.0}
    assert last == {"max_tokens": 12, "ignore_eos": True, **sampling, "extra_args": {"cactus_delta": 1.0}}


def test_bench_has_both_in_one_table(engines, pair, tmp_path, capsys) -> None:
    path = tmp_path / "found.jsonl"
    methods = ["--methods", "plain", "cactus", "auto", "--deltas", "1", "--repeats", "1"]
    extra = ["--backend", "transformers", "vllm", "--json", str(path)]
    assert cli.main(["bench", *pair, *BENCH, *methods, *extra]) == 0
    table = capsys.readouterr().out.split("\n\n")[2].splitlines()[1:]
    names = ["plain", "cactus", "auto", "plain (vllm)", "cactus (vllm)"]
    assert [line.split("  ")[0] for line in table[1:]] == names
    assert len({len(line) for line in table}) == 1 and len(table[0]) <= 100
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["prompts_sha256"] for line in lines}) == 1 and lines[3]["times_plain"] == 1


def test_eval_goes_on_with_transformers_answers(engines, pair, tmp_path, capsys) -> None:
    pytest.importorskip("lm_eval", reason="the extra `eval` is not installed")
    data = tmp_path / "gsm8k.jsonl"
    rows = [{"question": f"What is {n} + {n}?", "answer": f"#### {2 * n}"} for n in range(3)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    methods = ["--methods", "plain", "sps", "cactus:1", "mixture:0.5", "--num-assistant-tokens", "3"]
    output, summary = tmp_path / "answers.jsonl", tmp_path / "summary.jsonl"
    asked = ["eval", *pair, *methods, "--data", str(data), "--max-new-tokens", "8", "--batch-size", "2"]
    asked += ["--output", str(output), "--json", str(summary)]
    assert cli.main([*asked, "--device", "cpu"]) == 0
    assert cli.main([*asked, "--backend", "vllm"]) == 0
    table = capsys.readouterr().out.split("\n\n")[-2].splitlines()
    names = ["plain", "sps", "cactus:1", "mixture:0.5"]
    assert [line.split("  ")[0] for line in table[1:]] == [*names, *(f"{name} (vllm)" for name in names)]
    lines = [json.loads(line) for line in summary.read_text().splitlines()]
    assert [line["backend"] for line in lines] == ["transformers"] * 4 + ["vllm"] * 4
    assert lines[6]["ball_kl"] == pytest.approx(BALL_KL) and 0.5 < lines[6]["accepted_length"] <= 1
    assert lines[6]["emitted_kl"] is None and lines[5]["rejected_relative"] == 1

    assert [engine.options.get("additional_config") for engine in engines] == [
        None,
        {"cactus_hf": "cactus:0"},
        {"cactus_hf": "mixture:0.5"},
    ]
    asked_deltas = [params["extra_args"]["cactus_delta"] for _, params in engines[1].requests]
    assert asked_deltas == [0, 0, 1, 1, 0, 1], "methods of an engine take turns batch by batch"
    seeds = [params["seed"] for _, params in engines[1].requests]
    assert seeds == [0, 1, 0, 1, 2, 2] and {p["top_p"] for _, p in engines[1].requests} == {0.95}


def test_rounds_end_with_the_text() -> None:
    rounds = [(3, 1), (3, 3), (3, 0)]  # 2, 4 and 1 tokens behind the first
    assert until_end(rounds, 9) == rounds, "the last step had no drafts"
    assert until_end(rounds, 8) == [(3, 1), (3, 3), (1, 0)] and until_end(rounds, 7) == rounds[:2]
    assert until_end(rounds, 6) == rounds[:2] and until_end(rounds, 5) == [(3, 1), (2, 2)]
    assert until_end(rounds, 3) == [(2, 1)] and until_end(rounds, 1) == []


def test_rounds_are_counted_as_generate_counts_them() -> None:
    """Rounds told whole, as vLLM tells them, come to the counts of a call that has ended inside of one."""
    target, draft = tiny.pair("llama", eps=0.2)
    target = cactus_hf.enable(copy.deepcopy(target))
    prompt = tiny.ragged_prompts((5,)).inputs
    options = {"assistant_model": draft, "num_assistant_tokens": 3, "num_assistant_tokens_schedule": "constant"}
    options |= {
        "do_sample": True,
        "cactus_delta": 0.5,
        "generator": [0],
        "max_new_tokens": 50,
        "pad_token_id": tiny.PAD,
    }
    with cactus_hf.track() as calls:
        ids = target.generate(**prompt, **options, eos_token_id=None)[0, 5:].tolist()
        ends = [length for length in range(2, 20) if ids.index(ids[length - 1]) == length - 1]
        for length in ends:
            target.generate(**prompt, **options, eos_token_id=ids[length - 1])
    whole, *ended = calls
    rounds, kept = [], 0
    for kind in whole.kinds[0, 1:].tolist():
        is_last = kind in (cactus_hf.TokenKind.REPLACED, cactus_hf.TokenKind.EXTRA)
        rounds, kept = ([*rounds, (3, kept)], 0) if is_last else (rounds, kept + 1)
    assert len(ends) > 8
    for length, stats in zip(ends, ended, strict=True):
        expected = Counts.of([stats])._replace(ball_kl_sum=0.0)
        assert Counts.of_rounds(until_end(rounds, length), length - 1) == expected


def test_engines_of_methods() -> None:
    assert vllm_answers.engine_of(Method("plain")) == Engine()
    shared = {vllm_answers.engine_of(Method(name, 4)) for name in ("sps", "cactus:0.5", "cactus:inf")}
    assert shared == {Engine(4, "cactus:0")}
    assert vllm_answers.engine_of(Method("kl:0.05", 4)) == Engine(4, "kl:0.05")


def test_an_answer_ends_with_its_stop() -> None:
    tokenizer = tiny.byte_tokenizer()
    ids = tokenizer("abQ:cd", add_special_tokens=False)["input_ids"]
    assert running.up_to_stop(tokenizer, ids, ("Q:", "x")) == ids[:4]
    assert running.up_to_stop(tokenizer, ids, ("y",)) == ids == running.up_to_stop(tokenizer, ids, ())


@pytest.mark.parametrize(
    ("command", "asked", "said"),
    [
        ("bench", ["--device", "cpu"], "CUDA_VISIBLE_DEVICES"),
        ("bench", ["--pack"], "leave it out; packed layers"),
        ("bench", ["--draft-pack", "float16"], "--assistant-pack is not for --backend vllm"),
        ("bench", ["--draft-dtype", "bfloat16"], "--assistant-dtype is not for --backend vllm"),
        ("bench", ["--threads", "1"], "OMP_NUM_THREADS"),
        ("bench", ["--methods", "plain", "auto"], "leave auto out of --methods, or add the backend transformers"),
        ("bench", ["--vllm-options", "[]"], "needs a JSON object"),
        ("bench", ["--vllm-options", '{"model": "x"}'], "leave model out"),
        ("eval", ["--emitted-kl"], "vLLM does not measure it"),
        ("eval", ["--max-new-tokens", "100000"], "the target holds"),
    ],
)
def test_what_vllm_cannot_follow_is_refused(engines, pair, command, asked, said, tmp_path, capsys) -> None:
    if command == "eval":
        pytest.importorskip("lm_eval", reason="the extra `eval` is not installed")
        data = tmp_path / "gsm8k.jsonl"
        data.write_text('{"question": "1 + 1?", "answer": "#### 2"}\n')
        asked = [*asked, "--output", str(tmp_path / "x.jsonl"), "--data", str(data)]
    try:
        assert cli.main([command, *pair, "--backend", "vllm", *asked]) == 2
    except SystemExit as error:
        assert error.code == 2
    assert said in " ".join(capsys.readouterr().err.split()) and not engines


def test_a_plugin_that_vllm_does_not_load_is_named(engines, pair, monkeypatch, capsys) -> None:
    monkeypatch.setattr(vllm_backend, "has_plugin", lambda: False)
    assert cli.main(["bench", *pair, "--backend", "vllm"]) == 2
    assert "name cactus_hf in VLLM_PLUGINS" in capsys.readouterr().err and not engines


@pytest.mark.parametrize(("names", "allowed"), [([], None), (["cactus_hf"], "others"), (["cactus_hf"], "")])
def test_plugins_that_vllm_loads(names, allowed, monkeypatch) -> None:
    monkeypatch.setattr(vllm_backend.importlib.metadata, "entry_points", lambda group, name: names)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    assert vllm_backend.has_plugin() == bool(names)
    if allowed is not None:
        monkeypatch.setenv("VLLM_PLUGINS", allowed)
        assert not vllm_backend.has_plugin()
        monkeypatch.setenv("VLLM_PLUGINS", f"{allowed},cactus_hf")
        assert vllm_backend.has_plugin()


def test_what_is_missing_is_named(pair, monkeypatch, capsys) -> None:
    monkeypatch.setattr(vllm_backend.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["bench", *pair, "--backend", "vllm"]) == 2
    assert "pip install 'cactus_hf[vllm]'" in capsys.readouterr().err
    assert cli.main(["bench", "--backend", "vllm"]) == 2
    assert "give --model and --assistant, or --pair" in capsys.readouterr().err
    assert cli.main(["bench", "--vllm-options", "{}"]) == 2
    assert "--vllm-options is for --backend vllm" in capsys.readouterr().err


def test_the_precision_is_transformers_choice(pair_folder, monkeypatch) -> None:
    args = SimpleNamespace(
        pair=None, model=str(pair_folder / "target"), assistant=str(pair_folder / "draft"), dtype=None
    )
    assert vllm_backend.find_source(args).dtype == "float32"
    args.dtype = "bfloat16"
    assert vllm_backend.find_source(args).dtype == "bfloat16"
    args.dtype = None
    monkeypatch.setattr("cactus_hf.pairs.find_device", lambda: torch.device("cuda"))
    assert vllm_backend.find_source(args).dtype == "float32", "as the checkpoint says"
