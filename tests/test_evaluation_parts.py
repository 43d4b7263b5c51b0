"""The parts of `cactus-hf eval` that need neither lm-eval nor a model: rules, files, sums, scores compared."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, replace

import pytest

from cactus_hf import Cactus, Lenience, Mentored, Mixture, SpeculativeSampling, TopK, TypicalAcceptance
from cactus_hf.evaluation.methods import Method, method_name, parse_rule
from cactus_hf.evaluation.records import Answer, Records, parts, read
from cactus_hf.evaluation.running import batches, share
from cactus_hf.evaluation.summary import compare, sign_test, summarise
from cactus_hf.evaluation.table import HEADS, entry, table
from cactus_hf.evaluation.tasks import Question


def answer(question: int, method: str = "plain", length: int = 10, **counts: float) -> Answer:
    speculation = counts or None
    drafts = None if method == "plain" else 4
    return Answer("gsm8k", question, method, drafts, f"text {question}", 7, length, False, 0.5, 2, speculation)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("sps", SpeculativeSampling()),
        ("cactus:0.5", Cactus(0.5)),
        ("cactus:inf", Cactus(math.inf)),
        ("kl:0.05", Cactus(kl_budget=0.05)),
        ("mixture:0.25", Mixture(0.25)),
        ("typical", TypicalAcceptance()),
        ("typical:0.2", TypicalAcceptance(0.2)),
        ("top-k", TopK()),
        ("top-k:7", TopK(7)),
        ("lenience:0.5", Lenience(0.5)),
        ("mentored:0.1", Mentored(0.1)),
    ],
)
def test_names_of_rules(name, rule):
    assert parse_rule(name) == rule and method_name(name) == name
    options = Method(name, 6).options("draft")
    assert options["acceptance_rule"] == rule and options["num_assistant_tokens"] == 6
    assert options["assistant_model"] == "draft"


def test_one_spelling_each():
    assert method_name("cactus:.50") == "cactus:0.5" and method_name("top-k:5.0") == "top-k:5"
    assert method_name("plain") == "plain" and Method("plain").options("draft") == {}
    for name in ("top-k:1.5", "top-k:inf", "mixture:2", "plain:1", "cactus:nan"):
        with pytest.raises(argparse.ArgumentTypeError):
            method_name(name)


def test_parts_of_several_processes_are_read_together(tmp_path):
    path = tmp_path / "a.jsonl"
    both = [Records(str(path), {"seed": 0}, rank) for rank in (0, 1)]
    for rank, records in enumerate(both):
        records.add([answer(rank)])
    assert parts(path) == [path, tmp_path / "a.jsonl.rank1"]
    both[0].reload()
    assert [key.question for key in both[0].answers] == [0, 1]
    assert read(path) == ({"seed": 0}, [answer(0)])
    with pytest.raises(ValueError, match="seed: 0 there, 1 now"):
        Records(str(path), {"seed": 1})


def test_a_line_cut_off_is_dropped_and_another_is_an_error(tmp_path):
    path = tmp_path / "a.jsonl"
    Records(str(path), {}).add([answer(0), answer(1)])
    whole = path.read_text()
    path.write_text(whole[:-20])
    assert [each.question for each in read(path)[1]] == [0]
    assert path.read_text() == whole[:-20], "another process may be writing it"
    Records(str(path), {}, rank=1)
    assert path.read_text() == whole[:-20]
    Records(str(path), {})
    assert path.read_text() == "".join(whole.splitlines(keepends=True)[:2])
    path.write_text(whole.replace('"question": 0', '"quest": 0'))
    with pytest.raises(ValueError, match="line 2 is no line of"):
        read(path)


def test_a_line_without_its_line_break_is_whole(tmp_path):
    path = tmp_path / "a.jsonl"
    Records(str(path), {}).add([answer(0)])
    path.write_text(path.read_text()[:-1])
    Records(str(path), {}).add([answer(1)])
    assert [each.question for each in read(path)[1]] == [0, 1]
    path.write_text('{"settings": {}}')
    Records(str(path), {}).add([answer(1)])
    assert [each.question for each in read(path)[1]] == [1]


def test_an_answer_may_hold_any_character(tmp_path):
    path = tmp_path / "a.jsonl"
    odd = replace(answer(0), text="a\u2028b\x85c\u2029d")
    Records(str(path), {}).add([odd, answer(1)])
    assert read(path)[1] == [odd, answer(1)]


LINE = json.dumps(asdict(answer(0)))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"{LINE}\n", "no line of settings"),
        ('{"settings": 5}\n', "line 1 is no line of"),
        ("[1]\n", "line 1 is no line of"),
        ('{"settings": {}}\n' + LINE.replace('"text 0"', "5") + "\n", "line 2 .*`text` is no text"),
        ('{"settings": {}}\n' + LINE.replace('"speculation": null', '"speculation": {}') + "\n", "lacks 'rounds'"),
        ("my notes", "no file of `cactus-hf eval`"),
    ],
)
def test_files_of_something_else_stay_as_they_are(text, words, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=words):
        Records(str(path), {})
    assert path.read_text() == text


def test_a_header_that_was_cut_off_is_written_anew(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"settings": {"se')
    Records(str(path), {"seed": 0}).add([answer(0)])
    assert read(path) == ({"seed": 0}, [answer(0)])


def test_another_question_at_the_same_place_is_refused(tmp_path):
    records = Records(str(tmp_path / "a.jsonl"), {})
    records.add([replace(answer(0), prompt_sha256="a"), answer(1)])
    records.check_questions("gsm8k", {0: "a", 1: "b", 2: "c"})
    records.check_questions("ifeval", {0: "b"})
    with pytest.raises(ValueError, match="another question 0 than the one now"):
        records.check_questions("gsm8k", {0: "b"})


def test_batches_keep_order_and_stops_apart():
    asked = [Question(n, "?", ("x",) if n < 3 else ("y",)) for n in range(6)]
    work = batches(asked, 2)
    assert [[each.index for each in batch] for batch in work] == [[0, 1], [2], [3, 4], [5]]
    shares = [list(share(work, rank, 3)) for rank in range(3)]
    assert sorted(batch[0].index for own in shares for batch in own) == [0, 2, 3, 5]


def test_sums_by_hand():
    counts = {"rounds": 4, "drafted": 16, "verified": 10, "accepted": 6, "emitted": 11, "ball_kl_sum": 1.0}
    more = {**counts, "rounds": 6, "drafted": 24, "emitted_kl_sum": 0.5, "emitted_tv_sum": 0.1}
    summary = summarise("gsm8k", Method("sps", 4), [answer(0, "sps", **more), answer(1, "sps", **more)], {0: 1, 1: 0})
    assert summary.score == 0.5 and summary.error == pytest.approx(0.5)
    assert summary.counts.accepted_length == 1 and summary.wasted == pytest.approx((4 - 1) / 2)
    assert summary.emitted_kl == pytest.approx(0.05) and summary.emitted_tv == pytest.approx(0.01)
    assert summary.tokens_per_second == 20 and summary.mean_length == 10 and summary.cut == 0
    partly = summarise("gsm8k", Method("sps", 4), [answer(0, "sps", **more), answer(1, "sps", **counts)], {0: 1, 1: 0})
    assert partly.emitted_kl is None, "not measured in one of them"
    assert math.isnan(summarise("gsm8k", Method("plain"), [answer(0)], {0: 1}).error)


def test_paired_difference():
    plain = summarise("gsm8k", Method("plain"), [answer(n) for n in range(4)], {0: 1, 1: 0, 2: 0, 3: 1})
    other = summarise("gsm8k", Method("sps", 4), [answer(n, "sps") for n in range(1, 4)], {1: 1, 2: 1, 3: 1})
    difference = compare(other, plain)
    assert difference.value == pytest.approx(2 / 3) and difference.error == pytest.approx(1 / 3)
    assert (difference.num_better, difference.num_worse, difference.p_value) == (2, 0, 0.5)
    assert compare(other, summarise("gsm8k", Method("plain"), [answer(9)], {9: 1})) is None


def test_sign_test_is_exact():
    scipy = pytest.importorskip("scipy.stats")
    for better, worse in ((0, 0), (3, 3), (1, 6), (10, 2), (0, 5)):
        exact = scipy.binomtest(better, better + worse).pvalue if better + worse else 1.0
        assert sign_test(better, worse) == pytest.approx(exact)


def test_table_lines_up():
    counts = {"rounds": 4, "drafted": 16, "verified": 10, "accepted": 6, "emitted": 11, "ball_kl_sum": 1.0}
    summaries = [summarise("gsm8k", Method("plain"), [answer(0), answer(1)], {0: 1, 1: 0})]
    for name in ("sps", "cactus:1"):
        answers = [answer(n, name, **counts) for n in (0, 1)]
        summaries.append(summarise("gsm8k", Method(name, 4), answers, {0: 1, 1: 1}))
    lines = table(summaries).splitlines()
    assert len(lines) == 4 and len({len(line) for line in lines}) == 1 and lines[0].split()[:2] == list(HEADS[:2])
    assert "+50.0 (50.0)" in lines[3]
    entries = [entry(each, summaries) for each in summaries]
    assert json.loads(json.dumps(entries)) == entries
    assert [each["rejected_relative"] for each in entries] == [None, 1.0, 1.0]
