"""`cactus-hf eval` on a tiny pair: what it asks, writes and goes on with. Nothing is said of speed."""

from __future__ import annotations

import csv
import io
import json
import zipfile
from pathlib import Path

import pytest
import torch


pytest.importorskip("lm_eval", reason="the extra `eval` is not installed")

from cactus_hf import cli
from cactus_hf.evaluation import tasks
from cactus_hf.evaluation.records import read


NUM_QUESTIONS = 5
METHODS = ("plain", "sps", "cactus:1")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Questions in the form of GSM8K's file."""
    path = tmp_path_factory.mktemp("data") / "gsm8k.jsonl"
    rows = [{"question": f"What is {n} + {n}?", "answer": f"Twice {n}.\n#### {2 * n}"} for n in range(NUM_QUESTIONS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def options(pair_folder: Path, data: Path) -> list[str]:
    """Options that name a tiny pair with one token a byte, and the questions."""
    models = ["--model", str(pair_folder / "target"), "--assistant", str(pair_folder / "draft"), "--device", "cpu"]
    decoding = ["--max-new-tokens", "30", "--batch-size", "2", "--num-assistant-tokens", "3"]
    return ["eval", *models, *decoding, "--data", str(data), "--methods", *METHODS]


@pytest.fixture(scope="module")
def found(options, tmp_path_factory) -> tuple[list, list[dict]]:
    """The answers of a run, and the lines of its summary."""
    folder = tmp_path_factory.mktemp("out")
    path, summary = folder / "answers.jsonl", folder / "summary.jsonl"
    assert cli.main([*options, "--output", str(path), "--json", str(summary)]) == 0
    _, answers = read(path)
    return answers, [json.loads(line) for line in summary.read_text().splitlines()]


def test_every_method_answers_every_question(found):
    answers, _ = found
    keys = [(answer.question, answer.method, answer.num_assistant_tokens) for answer in answers]
    methods = [(name, None if name == "plain" else 3) for name in METHODS]
    assert sorted(keys, key=repr) == sorted(((n, *m) for n in range(NUM_QUESTIONS) for m in methods), key=repr)


def test_methods_take_turns_batch_by_batch(found):
    answers, _ = found
    order = [(answer.method, answer.question) for answer in answers]
    assert order[:6] == [(name, n) for name in METHODS for n in (0, 1)]


def test_counts_of_answers_and_summary_agree(found):
    answers, lines = found
    for line in lines:
        own = [answer for answer in answers if answer.method == line["method"]]
        assert line["questions"] == NUM_QUESTIONS and 0 <= line["score"] <= 1
        assert line["mean_length"] == pytest.approx(sum(answer.new_tokens for answer in own) / NUM_QUESTIONS)
        assert line["tokens_per_second"] == pytest.approx(sum(a.new_tokens for a in own) / sum(a.seconds for a in own))
        if line["method"] == "plain":
            assert line["accepted_length"] is line["emitted_kl"] is line["difference"] is None
            continue
        rounds, accepted, drafted = (
            sum(a.speculation[name] for a in own) for name in ("rounds", "accepted", "drafted")
        )
        assert line["accepted_length"] == pytest.approx(accepted / rounds)
        assert line["rejected"] == pytest.approx((drafted - accepted) / rounds / (accepted / rounds + 1))
        assert all(a.speculation["emitted"] == a.new_tokens and not a.is_cut == (a.new_tokens < 30) for a in own)
        assert line["difference"] == pytest.approx(line["score"] - lines[0]["score"])
    sps, cactus = lines[1:]
    assert sps["rejected_relative"] == 1 and abs(sps["emitted_kl"]) < 1e-9 < cactus["emitted_kl"]
    assert sps["settings"]["temperature"] == 0.6 and sps["settings"]["top_k"] == 20


def test_an_answer_is_scored_up_to_its_stop(pair_folder, data):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import cactus_hf
    from cactus_hf.evaluation.methods import Method
    from cactus_hf.evaluation.running import Evaluation, scored

    tokenizer = AutoTokenizer.from_pretrained(pair_folder / "target", padding_side="left")
    target, draft = (AutoModelForCausalLM.from_pretrained(pair_folder / name) for name in ("target", "draft"))
    decoding = {"do_sample": True, "max_new_tokens": 200, "top_k": 0, "pad_token_id": 0, "eos_token_id": 1}
    evaluation = Evaluation(cactus_hf.enable(target), draft, tokenizer, decoding, 0, False, "</think>")
    question = tasks.Question(0, "abc", ("e", "q"))
    for method in (Method("plain"), Method("cactus:1", 4)):
        answer = evaluation.answer("gsm8k", [question, question], method)[1]
        assert not set(answer.text) & {"e", "q"} and not answer.is_cut, "one token a byte: a stop comes soon"
        assert answer.new_tokens < 200
    thought = scored(tokenizer, tokenizer("a</think>bqc")["input_ids"], ("q",), "</think>")
    assert thought == "b"
    evaluation.options["pad_token_id"] = target.generation_config.eos_token_id = 1
    stopped, ended, whole = tokenizer("abq")["input_ids"] + [1, 1], [*tokenizer("ab")["input_ids"], 1, 1, 1], [5] * 5
    assert evaluation._lengths(torch.tensor([stopped, ended, whole]), ("q",)) == [3, 3, 5], "the pad token ends rows"


def test_a_run_cut_short_is_gone_on_with(options, found, tmp_path):
    answers, _ = found
    path = tmp_path / "answers.jsonl"
    few = [*options, "--output", str(path), "--limit", "3"]
    assert cli.main(few) == 0
    kept = path.read_text().splitlines(keepends=True)
    path.write_text("".join(kept[:-2]) + kept[-2][:40])  # killed while it wrote
    assert cli.main([*options, "--output", str(path)]) == 0
    _, again = read(path)
    assert {answer.key for answer in again} == {answer.key for answer in answers} and len(again) == len(answers)
    assert "".join(path.read_text().splitlines(keepends=True)[: len(kept) - 2]) == "".join(kept[:-2])
    texts = {answer.key: answer.text for answer in answers}
    drafted = [answer for answer in again if answer.method != "plain"]
    assert all(answer.text == texts[answer.key] for answer in drafted), "a question's seed is its own"


def test_other_settings_are_refused(options, tmp_path, capsys):
    path = tmp_path / "answers.jsonl"
    assert cli.main([*options, "--output", str(path), "--limit", "1"]) == 0
    assert cli.main([*options, "--output", str(path), "--limit", "1", "--temperature", "0.9"]) == 2
    message = capsys.readouterr().err
    assert "temperature: 0.6 there, 0.9 now" in message and "another --output" in message
    path.write_text("{}\n")
    assert cli.main([*options, "--output", str(path), "--limit", "1"]) == 2
    assert "line 1 is no line of" in capsys.readouterr().err


def test_other_questions_are_refused(options, data, tmp_path, capsys):
    """The first question is the same, the second is not."""
    path, other = tmp_path / "answers.jsonl", tmp_path / "other.jsonl"
    lines = data.read_text().splitlines(keepends=True)
    other.write_text(lines[0] + lines[2])
    assert cli.main([*options, "--output", str(path), "--limit", "2"]) == 0
    before = path.read_text()
    assert cli.main([*options, "--output", str(path), "--limit", "1", "--data", str(other)]) == 0
    assert cli.main([*options, "--output", str(path), "--data", str(other)]) == 2
    assert "another question 1 than the one now" in capsys.readouterr().err and path.read_text() == before


@pytest.mark.parametrize(
    ("text", "task"),
    [("", "gsm8k"), ("{", "gsm8k"), ('{"q": 1}\n', "gsm8k"), ('{"question": "1"}\n', "gpqa_diamond")],
)
def test_data_of_something_else(options, tmp_path, capsys, text, task):
    data = tmp_path / "questions.jsonl"
    data.write_text(text)
    assert cli.main([*options, "--output", str(tmp_path / "a.jsonl"), "--data", str(data), "--task", task]) == 2
    assert f"questions.jsonl does not hold questions of {task}" in capsys.readouterr().err
    assert not (tmp_path / "a.jsonl").exists()


def test_a_broken_archive(options, tmp_path, capsys):
    (tmp_path / "q.zip").write_text("x")
    changed = ["--data", str(tmp_path / "q.zip"), "--task", "gpqa_diamond"]
    assert cli.main([*options, "--output", str(tmp_path / "a.jsonl"), *changed]) == 2
    assert "q.zip does not hold questions of gpqa_diamond (BadZipFile" in capsys.readouterr().err


def test_ifeval_says_at_once_what_its_scores_lack(options, tmp_path, capsys, monkeypatch):
    import nltk

    def find(name: str) -> None:
        raise LookupError(name)

    monkeypatch.setattr(nltk.data, "find", find)
    monkeypatch.setattr(nltk, "download", lambda name: False)
    assert cli.main([*options, "--output", str(tmp_path / "a.jsonl"), "--task", "ifeval"]) == 2
    assert "in a folder that NLTK_DATA names" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (["--methods", "cactus"], "needs a number"),
        (["--methods", "sps:1"], "has no parameter"),
        (["--methods", "cactus:x"], "is not a number"),
        (["--methods", "cactus:-1"], "0 (lossless) or more"),
        (["--methods", "best"], "no method called 'best'"),
        (["--data", "nowhere.jsonl"], "no such file"),
        (["--output", "nowhere/x.jsonl"], "no folder nowhere"),
        (["--max-new-tokens", "100000"], "and the target holds"),
        (["--seed", "99999999999999999999"], "needs a whole number of at least 0 and at most 2.14748e+09"),
    ],
)
def test_bad_options_are_named(options, tmp_path, capsys, changed, message):
    try:
        assert cli.main([*options, "--output", str(tmp_path / "x.jsonl"), *changed]) == 2
    except SystemExit as error:
        assert error.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_gsm8k_scores_the_last_number(data):
    task = tasks.load_task("gsm8k", str(data))
    asked = tasks.questions(task, None, None, False)
    assert len(asked) == NUM_QUESTIONS and asked[2].prompt.startswith("Q: What is 2 + 2?") and "Q:" in asked[2].stops
    given = {1: "It is 7, no, 2.", 2: "The answer is 5.", 3: "$6.00"}
    assert tasks.scores(task, tasks.TASKS["gsm8k"], given) == {1: 1.0, 2: 0.0, 3: 0.0}


def test_gpqa_is_read_from_its_archive(tmp_path):
    text = io.StringIO()
    names = ["Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3"]
    writer = csv.DictWriter(text, names)
    writer.writeheader()
    writer.writerow(dict(zip(names, ("Which?", "right", "a", "b", "c"), strict=True)))
    path = tmp_path / "dataset.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("dataset/gpqa_diamond.csv", text.getvalue())
    task = tasks.load_task("gpqa_diamond", str(path))
    (question,) = tasks.questions(task, None, None, False)
    letter = next(c for c in "ABCD" if f"({c}) right" in question.prompt)
    score = tasks.TASKS["gpqa_diamond"]
    assert tasks.scores(task, score, {0: f"So it is ({letter})."}) == {0: 1.0}
    assert tasks.scores(task, score, {0: "So it is (Z)."}) == {0: 0.0}
