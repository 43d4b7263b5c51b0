"""`cactus-hf demo` on a tiny pair: what it prints, and that its table tells what the runs were."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import sys
from pathlib import Path

import pytest
import torch

import tiny
from cactus_hf import arguments, cli, comparison, demo, report
from cactus_hf.comparison import Comparison, Method, Row
from cactus_hf.generation import enable
from cactus_hf.packed_layers import missing_fbgemm


@pytest.fixture(scope="module")
def folders(pair_folder: Path) -> list[str]:
    """Options that name a tiny pair with one token a byte."""
    return ["--model", str(pair_folder / "target"), "--assistant", str(pair_folder / "draft"), "--device", "cpu"]


def run(folders: list[str], *options: str) -> int:
    return cli.main(["demo", *folders, "--max-new-tokens", "24", "--num-assistant-tokens", "3", *options])


@pytest.fixture(scope="module")
def found(folders: list[str]) -> dict:
    """The JSON object of a run."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert run(folders, "--json", "--delta", "0.5", "--repeats", "2") == 0
    assert out.getvalue().count("\n") == 1, "one object and nothing else"
    return json.loads(out.getvalue())


def test_json_says_what_ran(found: dict) -> None:
    assert found["settings"]["delta"] == 0.5 and found["settings"]["prompt"] == demo.PROMPT
    assert found["versions"].keys() == {"cactus_hf", "python", "torch", "transformers"}
    assert found["dtype"] == "float32" and found["device"].startswith("CPU")
    assert found["parameters"]["target"] == tiny.pair("llama", vocab=260, eps=0.1)[0].num_parameters()


def test_json_rows(found: dict) -> None:
    plain, lossless, cactus = found["rows"]
    assert [row["method"] for row in found["rows"]] == ["plain", "lossless", "cactus"]
    assert [row["delta"] for row in found["rows"]] == [None, 0.0, 0.5]
    assert plain["accepted_length"] is None and plain["times_plain"] == 1
    for row in found["rows"]:
        assert len(row["seconds"]) == len(row["new_tokens"]) == 2 and max(row["new_tokens"]) <= 24
    for row in (lossless, cactus):
        assert 0 < row["accepted_length"] <= 3 and 0 < row["acceptance"] <= 1
    # delta 0 emits the target's law up to rounding in float64
    assert plain["emitted_kl"] == 0 and abs(lossless["emitted_kl"]) < 1e-9 < cactus["emitted_kl"]


def test_json_text_is_that_of_its_tokens(found: dict) -> None:
    kinds = [token["kind"] for token in found["tokens"]]
    assert kinds[0] == "first" and set(kinds[1:]) <= {"accepted", "boosted", "replaced", "extra"}
    assert found["text"].startswith("".join(token["text"] for token in found["tokens"]))
    ids = [token["id"] for token in found["tokens"]]
    assert tiny.byte_tokenizer().decode(ids, skip_special_tokens=True) == found["text"]


def test_infinite_delta_is_still_json(folders: list[str], capsys) -> None:
    assert run(folders, "--json", "--delta", "inf", "--repeats", "1") == 0
    found = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert found["settings"]["delta"] == found["rows"][-1]["delta"] == "inf"


def test_same_seed_same_text(folders: list[str], capsys) -> None:
    texts = []
    for seed in ("1", "1", "2"):
        assert run(folders, "--json", "--repeats", "1", "--seed", seed) == 0
        texts.append(json.loads(capsys.readouterr().out)["text"])
    assert texts[0] == texts[1] != texts[2]


def test_printed_output(folders: list[str], capsys) -> None:
    assert run(folders, "--prompt", "Why is the sky blue?") == 0
    out, err = capsys.readouterr()
    assert not err and "\x1b" not in out, "no terminal, so neither progress bars nor colours"
    assert "{kept thanks to the bonus}" in out and "> Why is the sky blue?" in out
    table = re.search(r"^ +delta .*\nplain .*\nlossless .*\ncactus .*\n", out, re.MULTILINE)
    assert table and len({len(line) for line in table[0].splitlines()}) == 1, "columns must line up"
    assert all(len(line) <= report.WIDTH for line in table[0].splitlines())
    assert "median of the runs" in out and "delta does not bound it" in " ".join(out.split())


@pytest.mark.parametrize(
    "options, environment, is_coloured",
    [([], {}, True), (["--no-color"], {}, False), ([], {"NO_COLOR": "1"}, False), ([], {"TERM": "dumb"}, False)],
)
def test_colours(folders: list[str], options, environment, is_coloured, monkeypatch, capsys) -> None:
    for name, value in {"NO_COLOR": "", "TERM": "xterm", **environment}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert run(folders, "--repeats", "1", *options) == 0
    assert ("\x1b[" in capsys.readouterr().out) == is_coloured


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], ", packed ("),
        (["--no-pack"], "draft ("),
        (["--no-pack", "--assistant-dtype", "bfloat16"], ", draft in bfloat16 ("),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_layers_are_packed_on_a_cpu_unless_told_otherwise(
    folders: list[str], options: list[str], said: str, capsys
) -> None:
    assert run(folders, "--repeats", "1", "--max-new-tokens", "8", *options) == 0
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "packings"),
    [
        ([], (True, "float16")),
        (["--no-pack"], (False, False)),
        (["--assistant-dtype", "bfloat16"], (True, True)),
        (["--pack"], (True, True)),
        (["--pair", "qwen3-8b"], (True, True)),
    ],
    ids=str,
)
def test_the_embedded_draft_has_weights_in_float16(options: list[str], packings: tuple, monkeypatch) -> None:
    if missing_fbgemm():
        pytest.skip("torch has no FBGEMM here")
    seen = []
    monkeypatch.setattr(demo, "load", lambda args: seen.append(arguments.packings(args)) or sys.exit(0))
    with pytest.raises(SystemExit):
        cli.main(["demo", "--device", "cpu", *options])
    assert seen == [packings]


def test_the_target_keeps_its_precision_where_it_shares_weights_with_the_draft() -> None:
    target, draft = tiny.ARCHITECTURES["llama"].build(), tiny.ARCHITECTURES["llama"].build()
    draft.model.embed_tokens = target.model.embed_tokens
    args = argparse.Namespace(assistant_dtype="bfloat16", pack=False, assistant_pack=None)
    pair = arguments.prepared(args, arguments.Pair("tiny", target, draft, None))
    assert pair.draft.dtype == torch.bfloat16
    assert {each.dtype for each in pair.target.parameters()} == {torch.float32}


def test_chat_template_is_applied_where_there_is_one() -> None:
    tokenizer = tiny.byte_tokenizer()
    pair = arguments.Pair("tiny", *tiny.pair("llama", vocab=260, eps=0.1), tokenizer)
    assert tokenizer.decode(demo.prompt_inputs(pair, "sky")["input_ids"][0]) == "user : sky assistant : "
    tokenizer.chat_template = None
    assert tokenizer.decode(demo.prompt_inputs(pair, "sky")["input_ids"][0]) == "sky"
    with pytest.raises(ValueError, match="no tokens: give some text"):
        demo.prompt_inputs(pair, "")
    with pytest.raises(ValueError, match="no chat template"):
        arguments.encode(tokenizer, [{"role": "user", "content": "sky"}])


@pytest.mark.parametrize(
    "options, said",
    [
        (["--pair", "qwen3-8b", "--model", "x"], "--pair names both models"),
        (["--model", "x"], "--assistant (the draft) is missing"),
        (["--assistant", "x"], "--model (the target) is missing"),
        (["--pair", "qwen3"], "no pair called 'qwen3'. Did you mean qwen3-"),
        (["--device", "cpu:9"], "no device cpu:9"),
        (["--model", "./nowhere", "--assistant", "x"], "There is no folder ./nowhere"),
    ],
)
def test_mistakes(options: list[str], said: str, capsys) -> None:
    assert cli.main(["demo", *options]) == 2
    out, err = capsys.readouterr()
    assert not out and said in err and err.count("\n") == 1


@pytest.fixture
def tiny_comparison() -> Comparison:
    target, draft = tiny.pair("llama", vocab=260, eps=0.1)
    inputs = {"input_ids": torch.tensor([[5, 6, 7]]), "attention_mask": torch.ones(1, 3).long()}
    options = {"max_new_tokens": 20, "top_k": 0, "pad_token_id": tiny.PAD, "eos_token_id": None}
    return Comparison(enable(target), draft, inputs, options, {"num_assistant_tokens": 3})


def test_methods_take_turns_with_the_same_seeds(tiny_comparison: Comparison, monkeypatch) -> None:
    calls = []
    generate = tiny_comparison.generate
    monkeypatch.setattr(
        tiny_comparison,
        "generate",
        lambda method, seed, **own: calls.append((method.name, seed, own)) or generate(method, seed, **own),
    )
    plain, lossless = Method("plain", None), Method("lossless", 0.0)
    tiny_comparison.rows((plain, lossless), seed=7, repeats=2, measured={})
    warm_up, turns = calls[:2], calls[2:]
    assert [own["max_new_tokens"] for _, _, own in warm_up] == [comparison.WARM_UP_TOKENS] * 2
    assert turns == [("plain", 7, {}), ("lossless", 7, {}), ("plain", 8, {}), ("lossless", 8, {})]


def test_slow_machine_takes_fewer_turns(tiny_comparison: Comparison, monkeypatch) -> None:
    monkeypatch.setattr(comparison, "TIME_LIMIT", 0.0)
    (row,) = tiny_comparison.rows((Method("plain", None),), seed=0, repeats=5, measured={})
    assert row.new_tokens == [20]


def test_plain_runs_stock_generation(tiny_comparison: Comparison) -> None:
    run = tiny_comparison.generate(Method("plain", None), seed=3)
    torch.manual_seed(3)
    stock = tiny_comparison.target.generate(**tiny_comparison.inputs, **tiny_comparison.options, do_sample=True)
    assert run.tokens == stock[0, 3:].tolist() and run.stats is None and run.seconds > 0


def row(method: str, *rates: float, emitted_kl: float = 0.0) -> Row:
    return Row(method, 0.5, [100] * len(rates), [100 / rate for rate in rates], None, None, emitted_kl)


def test_row_takes_the_median_and_the_spread() -> None:
    assert row("plain", 10, 40, 20).tokens_per_second == pytest.approx(20)
    assert row("plain", 10, 40, 20).spread == pytest.approx(1.5)


@pytest.mark.parametrize(
    "plain, cactus, said",
    [
        ((10, 11, 12), (15, 16.5, 18), "Cactus was 1.50 times as fast as plain decoding here, in 3 runs of each."),
        ((10, 11, 12), (6, 5.5, 5), "Cactus was not faster than plain decoding here, but 0.50 times as fast"),
        ((10, 11, 12), (11, 12.1, 13), "No clear difference in speed .* 1.10 times, but the runs overlap"),
        ((10, 10), (50, 50), "With 2 of each method there are too few runs"),
    ],
)
def test_verdict_claims_no_more_than_the_runs_show(plain, cactus, said: str) -> None:
    text = report.verdict([row("plain", *plain), row("lossless", *plain), row("cactus", *cactus)])
    assert re.match(said, " ".join(text.split()))


@pytest.mark.parametrize("emitted_kl, is_warned", [(0.05, False), (0.3, True)])
def test_verdict_does_not_sell_speed_without_its_price(emitted_kl: float, is_warned: bool) -> None:
    text = report.verdict([row("plain", 1, 1, 1), row("cactus", 2, 2, 2, emitted_kl=emitted_kl)])
    assert ("At delta 0.5 its text is drawn from a law 0.30 nats" in " ".join(text.split())) == is_warned
