"""`cactus-hf bench` on a tiny pair: what it prints and writes, which options it refuses. Nothing is said of speed."""

from __future__ import annotations

import functools
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from transformers import CompileConfig

from cactus_hf import cli
from cactus_hf.bench import command, methods, options, presets, rivals
from cactus_hf.report import WIDTH as NARROW


NEW_TOKENS = 12
METHODS = ("plain", "stock", "cactus", "mixture", "prompt-lookup")


@pytest.fixture(scope="module")
def folders(pair_folder: Path) -> list[str]:
    """Options that name a tiny pair with one token a byte."""
    return ["--target", str(pair_folder / "target"), "--draft", str(pair_folder / "draft"), "--device", "cpu"]


def bench(*options: str) -> int:
    return cli.main(["bench", "--repeats", "2", "--max-new-tokens", str(NEW_TOKENS), *options])


def run(folder: Path, *options: str) -> list[dict]:
    """The lines of JSON of a run."""
    path = folder / "found.jsonl"
    assert bench("--json", str(path), *options) == 0
    lines = path.read_text().splitlines()
    return [json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON")) for line in lines]


@pytest.fixture(scope="module")
def found(folders, tmp_path_factory) -> list[dict]:
    chosen = ["--methods", *METHODS, "--deltas", "0", "0.5", "--num-assistant-tokens", "2", "4"]
    return run(tmp_path_factory.mktemp("out"), *folders, *chosen, "--batch-sizes", "1", "3", "--num-prompts", "3")


def test_a_line_for_each_method_batch_size_and_length(found) -> None:
    def key(line: dict) -> tuple:
        return line["batch_size"], line["method"], line["delta"], line["num_assistant_tokens"]

    settings = [("plain", None, (None,))]
    settings += [(name, None, (2, 4)) for name in ("stock", "mixture", "prompt-lookup")]
    settings += [("cactus", delta, (2, 4)) for delta in (0, 0.5)]
    wanted = {(size, name, delta, m) for size in (1, 3) for name, delta, lengths in settings for m in lengths}
    assert len(found) == len(wanted) and {key(line) for line in found} == wanted


def test_all_methods_write_the_same_number_of_tokens(found) -> None:
    assert {tuple(line["new_tokens"]) for line in found} == {(3 * NEW_TOKENS,) * 2}
    assert all(len(line["seconds"]) == 2 and min(line["seconds"]) > 0 for line in found)


def test_counts_fit_together(found) -> None:
    for line in found:
        if line["method"] == "plain":
            assert line["accepted_length"] is line["acceptance"] is line["draft_ms"] is None
            continue
        assert 0 <= line["acceptance"] <= 1 and 0 <= line["accepted_length"] <= line["num_assistant_tokens"]
        # One token a round is not a draft; a text may end among the drafts kept
        tokens, kept = line["tokens_per_round"], line["accepted_length"]
        assert kept <= tokens <= kept + 1 + 1e-12
        # Stock assisted generation draws the first token of a text in a round
        firsts = 0 if line["method"] == "stock" else 3 * 2
        assert line["rounds"] * tokens == pytest.approx(sum(line["new_tokens"]) - firsts)


def test_times_fit_together(found) -> None:
    for line in found:
        assert line["overhead_ms"] == pytest.approx(line["round_ms"] - line["in_forwards_ms"])
        assert 0 <= line["overhead_ms"] < line["round_ms"]
        rates = [tokens / seconds for tokens, seconds in zip(line["new_tokens"], line["seconds"], strict=True)]
        assert line["tokens_per_second"] == pytest.approx(sum(rates) / 2)
        assert 0 < line["efficiency"] < math.inf
        assert any(each["bare_ms"] and each["in_situ_ms"] for each in line["forwards"])
        rows = {each["rows"] for each in line["forwards"]}
        assert max(rows) == (1 if line["is_row_by_row"] else line["batch_size"])


def test_passes_are_those_of_the_method(found) -> None:
    for line in found:
        widths = {role: set() for role in ("target", "draft")}
        for each in line["forwards"]:
            widths[each["role"]].add(each["width"])
        most = (line["num_assistant_tokens"] or 0) + 1
        assert max(widths["target"]) <= most and (widths["draft"] == set()) == (
            line["method"] in ("plain", "prompt-lookup")
        )


def test_stock_is_said_to_run_row_by_row(found) -> None:
    assert {(line["method"], line["batch_size"]) for line in found if line["is_row_by_row"]} == {("stock", 3)}


def test_divergence_is_that_of_the_rule(found) -> None:
    for line in found:
        has_law = line["method"] in ("cactus", "mixture", "prompt-lookup")
        assert (line["emitted_kl"] is not None) == has_law
        assert (line["ball_kl"] is not None) == (has_law and line["method"] != "mixture")
        if line["method"] == "cactus":
            # Exact at delta 0 up to rounding in float64
            assert line["emitted_kl"] > 1e-4 if line["delta"] else abs(line["emitted_kl"]) < 1e-9
            assert line["ball_kl"] <= math.log1p(2 * line["delta"]) + 1e-12


def test_surroundings_are_on_each_line(found) -> None:
    for line in found:
        assert {"cactus_hf", "python", "torch", "transformers"} <= line["versions"].keys()
        assert line["device"].startswith("CPU") and line["threads"] == torch.get_num_threads()
        assert line["git_revision"] is None or len(line["git_revision"].removesuffix("-dirty")) == 40
        assert line["settings"]["seed"] == 0 and line["settings"]["num_prompts"] == 3
        assert line["peak_memory_bytes"] > 0 and "resident" in line["peak_memory_kind"]


def test_printed_table(folders, capsys) -> None:
    assert bench(*folders, "--methods", "plain", "stock", "cactus", "--deltas", "inf", "--batch-sizes", "1", "2") == 0
    out, err = capsys.readouterr()
    assert not err, "no terminal, so no progress bar"
    head, first, second, legend = out.strip().rsplit("\n\n", 3)
    assert "float32 on CPU" in head and first.startswith("1 row,") and second.startswith("2 rows a batch,")
    for block in (first, second):
        title, *lines = block.splitlines()
        assert f"{NEW_TOKENS} new tokens a row" in title
        assert len({len(line) for line in lines}) == 1 and len(lines[0]) <= 100, "columns must line up"
        assert [line.split()[0].rstrip("*") for line in lines[1:]] == ["plain", "stock", "cactus"]
        assert " inf " in lines[3]
    assert "stock*" not in first and "stock*" in second
    assert "one row after another" in legend and NARROW < max(map(len, legend.splitlines())) <= 100


def test_compiled_passes_are_not_looked_into(folders, tmp_path, monkeypatch) -> None:
    eager = functools.partial(CompileConfig, backend="eager", mode=None)  # the default needs a compiler of C++
    monkeypatch.setattr(methods, "CompileConfig", eager)
    options = ["--methods", "plain", "cactus", "compiled", "--deltas", "0.5", "--num-assistant-tokens", "3"]
    plain, ours, compiled = run(tmp_path, *folders, *options, "--batch-sizes", "2")
    assert (compiled["method"], compiled["delta"], compiled["is_row_by_row"]) == ("compiled", 0.5, False)
    unseen = ("target_ms", "draft_ms", "overhead_ms", "overhead_bare_ms", "efficiency")
    assert all(compiled[name] is None for name in unseen) and not compiled["forwards"]
    assert all(ours[name] is not None for name in unseen)
    assert compiled["acceptance"] == ours["acceptance"] and compiled["new_tokens"] == plain["new_tokens"]
    assert compiled["emitted_kl"] == pytest.approx(ours["emitted_kl"], rel=1e-3)


def test_greedy_has_one_rule(folders, tmp_path) -> None:
    lines = run(tmp_path, *folders, "--greedy", "--methods", "plain", "cactus", "--num-prompts", "1")
    assert [(line["method"], line["delta"], line["emitted_kl"]) for line in lines] == [
        ("plain", None, None),
        ("cactus", None, None),
    ]


def test_prompts_of_a_file_and_of_a_length(folders, tmp_path) -> None:
    file = tmp_path / "prompts.jsonl"
    chat = [{"role": "user", "content": "sky"}, {"role": "assistant", "content": "blue"}]
    file.write_text("".join(json.dumps({"prompt": prompt, "id": 1}) + "\n\n" for prompt in ("why", chat)))
    lines = run(tmp_path, *folders, "--prompts", str(file), "--methods", "plain")
    written = ["user : why assistant : ", "user : sky assistant : blue assistant : "]
    assert lines[0]["mean_prompt_len"] == sum(map(len, written)) / 2 and lines[0]["context"] is None
    asked = ["--prompts", str(file), "--methods", "plain", "--contexts", "30", "50"]
    assert [line["mean_prompt_len"] for line in run(tmp_path, *folders, *asked)] == [30, 50]


def test_synthetic_acceptance_is_the_one_asked_for(tmp_path, capsys) -> None:
    acceptance = 0.7
    asked = ["--preset", "tiny", "--layers", "1", "--synthetic-acceptance", str(acceptance), "--device", "cpu"]
    lines = run(tmp_path, *asked, "--batch-sizes", "16", "--max-new-tokens", "150", "--num-assistant-tokens", "3")
    assert "SYNTHETIC" in capsys.readouterr().out
    by_lot = next(line for line in lines if line["method"] == "cactus")
    assert [line["method"] for line in lines][:2] == ["plain", "cactus"] and by_lot["ball_kl"] is None
    assert all(line["synthetic_acceptance"] == acceptance for line in lines)
    error = math.sqrt(acceptance * (1 - acceptance) / by_lot["verified"])
    assert error < 0.01 and abs(by_lot["acceptance"] - acceptance) < 4 * error  # 4 sigma: once in 15,000 seeds


def test_auto_has_no_length_to_set(folders, tmp_path) -> None:
    asked = ["--methods", "plain", "auto", "--deltas", "0", "1", "--num-assistant-tokens", "2", "4"]
    lines = run(tmp_path, *folders, *asked)
    assert [(line["method"], line["delta"]) for line in lines] == [("plain", None), ("auto", 0), ("auto", 1)]
    assert all(line["num_assistant_tokens"] is None and line["new_tokens"] == [2 * NEW_TOKENS] * 2 for line in lines)


def test_plot(folders, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "speed.png"
    asked = ["--methods", "plain", "cactus", "--contexts", "20", "30", "--batch-sizes", "1", "2"]
    assert bench(*folders, *asked, "--plot", str(picture)) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_plot_without_matplotlib(monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert bench("--plot", "speed.png") == 2
    assert "pip install 'cactus_hf[plot]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "asked, said",
    [
        (["--pair", "qwen3-8b", "--target", "x"], "--pair names both models"),
        (["--preset", "tiny", "--target", "x", "--draft", "y"], "--preset names both models"),
        (["--preset", "qwen3-8b", "--synthetic-acceptance", "0.8"], "Did you mean qwen3-0.6b+8b"),
        (["--preset", "qwen3-0.6b+8b"], "add --synthetic-acceptance"),
        (["--layers", "2"], "--layers is for --preset"),
        (["--synthetic-acceptance", ".8", "--greedy"], "--greedy means nothing"),
        (["--synthetic-acceptance", ".8", "--deltas", "1"], "--deltas means nothing"),
        (["--synthetic-acceptance", ".8", "--methods", "stock", "plain"], "leave stock out"),
        (["--greedy", "--deltas", "1"], "leave --deltas out"),
        (["--greedy", "--temperature", "1"], "leave --temperature out"),
        (["--greedy", "--methods", "mixture"], "leave mixture out"),
        (["--methods", "plain", "--deltas", "1"], "--deltas is for the methods"),
        (["--methods", "plain", "--mixture-weight", ".5"], "--mixture-weight is for"),
        (["--mixture-weight", "1"], "take the method cactus with --deltas 0"),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--num-prompts", "99"], "there are 8 prompts"),
        (["--json", "nowhere/x.jsonl"], "no folder nowhere"),
        (["--plot", "x.pdf"], "ends in .png"),
        (["--vocab-sizes", "10"], "--vocab-sizes is for --verify"),
        (["--verify", "--pair", "qwen3-8b", "--top-k", "5"], "leave --pair, --top-k out"),
        (["--verify", "--max-new-tokens", "5"], "leave --max-new-tokens out"),
    ],
)
def test_mistakes_are_told_before_models_are_loaded(asked, said, monkeypatch, capsys) -> None:
    monkeypatch.setattr(command, "load", lambda args: pytest.fail("a model was loaded"))
    monkeypatch.setattr(presets, "build_pair", lambda *_: pytest.fail("a model was made"))
    assert cli.main(["bench", *asked]) == 2
    out, err = capsys.readouterr()
    assert not out and said in err and err.count("\n") == 1


def test_texts_that_outgrow_the_target_are_refused(folders, capsys) -> None:
    assert bench(*folders, "--contexts", "5000") == 2
    assert "the target holds" in capsys.readouterr().err


def chosen(*asked: str) -> list[str]:
    args = cli.make_parser(["bench"]).parse_args(["bench", *asked])
    options.check_options(args)
    return list(options.chosen_kinds(args))


def test_methods_that_cannot_be_had_are_left_out_or_refused(monkeypatch) -> None:
    monkeypatch.setattr(rivals, "is_installed", lambda name: name == "economize")
    assert chosen() == ["plain", "stock", "cactus", "mixture", "auto", "economize"]
    assert chosen("--greedy") == ["plain", "stock", "cactus", "auto", "economize"]
    assert chosen("--top-k", "5") == ["plain", "stock", "cactus", "mixture", "auto"]
    with pytest.raises(ImportError, match="pip install --no-deps flashspec"):
        chosen("--methods", "flashspec")
    with pytest.raises(ValueError, match="economize has no top-k"):
        chosen("--methods", "economize", "--top-k", "5")


def test_the_options_name_every_rival() -> None:
    assert set(rivals.RIVALS) == set(rivals.INSTALL) <= set(options.KINDS)
