"""`calibrate` and `cactus-hf calibrate` on tiny pairs: laws along texts, resuming, predictions held to runs."""

from __future__ import annotations

import contextlib
import copy
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GenerationConfig
from transformers.generation import LogitsProcessorList

import cactus_hf
import tiny
from cactus_hf import Cactus, Calibration, TopK, cli
from cactus_hf.calibration import measuring
from cactus_hf.calibration.checking import check
from cactus_hf.calibration.sampling import Texts, enabled


OPTIONS = {"eos_token_id": None, "pad_token_id": 0, "temperature": 0.8, "top_k": 0}
TOKENIZER = tiny.word_tokenizer()
PROMPTS = [[5, 6, 7], [9, 4, 8, 12, 30], [20, 21], [33, 5, 6, 7], [40]]


def calibrate(pair=None, prompts=PROMPTS, **options) -> Calibration:
    target, draft = pair or tiny.pair("llama", eps=0.1)
    options = {"deltas": (0.0, 0.1, 0.5), "max_new_tokens": 10, "longest": 4, "num_assistant_tokens": 3} | options
    return cactus_hf.calibrate(target, draft, prompts, **{"rules": (TopK(2),), "batch_size": 2, **OPTIONS, **options})


@pytest.fixture(scope="module")
def whole() -> Calibration:
    return calibrate()


class Remembering:
    """A user's processor that counts its calls and forbids a token at each."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        scores = scores.clone()
        scores[:, self.calls + 3] = -torch.inf
        return scores


@pytest.mark.parametrize(
    "options",
    (
        {"top_k": 7, "top_p": 0.9},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 6},
        {"logits_processor": LogitsProcessorList([Remembering()])},
    ),
    ids=("warpers", "of the text", "remembering"),
)
def test_laws_are_those_of_generate(options):
    """The target's logits along a text are the scores that `generate()` drew it by; the draft's, those of its own."""
    target, draft = tiny.pair("llama", eps=0.1)
    settings = OPTIONS | {"do_sample": True, "max_new_tokens": 9} | options
    seeds, prompts = [3, 4, 5], PROMPTS[:3]
    with enabled(target):
        texts = Texts(target, draft, settings)
        found = list(texts.read(prompts, seeds))
        output = texts.write(prompts, seeds, output_scores=True)
        # With the draft in the target's place the processed logits of the same texts should be the same
        swapped = Texts(draft, target, settings)
        swapped.write = lambda *_: output  # type: ignore[method-assign]
        with enabled(draft):
            others = list(swapped.read(prompts, seeds))
    for row, text in enumerate(found):
        assert torch.equal(text.tokens, output.sequences[row, -9:])
        scores = torch.stack([scores[row] for scores in output.scores])
        # float32, in passes over other numbers of tokens
        torch.testing.assert_close(text.target_logits, scores, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(text.draft_logits, others[row].target_logits, atol=1e-4, rtol=1e-4)


def test_texts_end_where_they_end():
    """Rows with an end of sequence count up to it."""
    target, draft = tiny.pair("llama", eps=0.1)
    settings = OPTIONS | {"do_sample": True, "max_new_tokens": 30, "eos_token_id": list(range(4, 20))}
    with enabled(target):
        lengths = [len(text.tokens) for text in Texts(target, draft, settings).read(PROMPTS, range(5))]
    assert len(set(lengths)) > 1 and max(lengths) < 30
    found = calibrate(eos_token_id=settings["eos_token_id"], max_new_tokens=30)
    assert int(found.positions[:, 0, 0].max()) < 29


def test_a_killed_run_goes_on(whole, tmp_path, monkeypatch):
    path, calls = tmp_path / "run.jsonl", []

    def killed(*args):
        calls.append(1)
        if len(calls) == 4:  # in the second batch of two
            raise KeyboardInterrupt
        return evaluate(*args)

    evaluate = measuring.evaluate
    with monkeypatch.context() as patch:
        patch.setattr(measuring, "evaluate", killed)
        with pytest.raises(KeyboardInterrupt):
            calibrate(resume=path)
    assert len(path.read_text().splitlines()) == 3, "the header and one batch"
    with path.open("a") as file:
        file.write('{"prompt": 2, "rounds": [0.1, ')  # killed while writing
    with monkeypatch.context() as patch:
        patch.setattr(measuring, "evaluate", lambda *args: calls.append(1) or evaluate(*args))
        again = calibrate(resume=path)
    assert len(calls) == 4 + 3, "the first batch is not read again"
    assert torch.equal(again.rounds, whole.rounds) and torch.equal(again.positions, whole.positions)
    assert again.table() == whole.table() == Calibration.from_json(path).table()


@pytest.mark.parametrize(
    ("change", "words"),
    (
        ({"seed": 1}, "another `seed`"),
        ({"temperature": 0.5}, "another `options`"),
        ({"prompts": [[4]]}, "num_prompts"),
    ),
)
def test_a_file_of_another_calibration_is_refused(whole, tmp_path, change, words):
    whole.to_json(tmp_path / "c.jsonl")
    before = (tmp_path / "c.jsonl").read_text()
    with pytest.raises(ValueError, match=words):
        calibrate(resume=tmp_path / "c.jsonl", **change)
    assert (tmp_path / "c.jsonl").read_text() == before


def test_the_model_stays_as_it_was():
    target, draft = tiny.pair("llama", eps=0.1)
    target = cactus_hf.disable(copy.deepcopy(target))  # other tests may have enabled the one that all share
    calibrate((target, draft), PROMPTS[:1])
    assert not isinstance(target, cactus_hf.generation.SpeculativeMixin)


def test_prediction_comes_true():
    """Calls at another seed report what was predicted, lossless and not; seeds are fixed.

    At delta 1 this draft, of which half is kept, is .6 nats away, and texts go elsewhere than the target's.
    """
    pair = tiny.vocabulary8(seed=0), tiny.vocabulary8(seed=1)
    prompts = [[3, 5, 2, 6]] * 256
    found = calibrate(pair, prompts, max_new_tokens=12, batch_size=256, temperature=1.0, deltas=(0.0, 0.2, 1.0))
    with enabled(pair[0]) as target:
        texts = Texts(target, pair[1], OPTIONS | {"do_sample": True, "max_new_tokens": 12, "temperature": 1.0})
        for delta, tolerance in ((0.0, 0.05), (0.2, 0.05), (1.0, 0.1)):
            answer = found.at(delta)
            reported = check(texts, prompts, answer, 256, seed=7)
            for name in ("emitted_kl", "position_acceptance", "accepted_length"):
                expected, got = getattr(answer, name).value, getattr(reported, name).value
                assert got == pytest.approx(expected, rel=tolerance, abs=1e-12), (delta, name)


@pytest.mark.parametrize(
    ("options", "words"),
    (
        ({"prompts": []}, "at least one prompt"),
        ({"prompts": ["text"]}, "pass `tokenizer=`"),
        ({"deltas": ()}, "`deltas` is empty"),
        ({"deltas": (0.1, float("inf"))}, "finite"),
        ({"deltas": (-1.0,)}, "0 .lossless. or more"),
        ({"rules": (TopK(torch.tensor([1, 2])),)}, "one value a row"),
        ({"rules": (Cactus(kl_total=1.0),)}, "depends on the positions before"),
        ({"max_new_tokens": 2}, "below 3"),
        ({"num_assistant_tokens": 5}, "`longest` is only 4"),
        ({"batch_size": 0}, "`batch_size` must be"),
        ({"cactus_delta": 0.1}, "sets `cactus_delta` itself"),
        ({"do_sample": False}, "Greedy decoding"),
        ({"max_new_tokens": 10**6}, "The longest prompt and its new tokens"),
        ({"prompts": [[5], []]}, "Prompt 1 has no tokens"),
        ({"prompts": "text", "tokenizer": TOKENIZER}, "must be a list"),
        ({"prompts": TOKENIZER(["w4", "w5"]), "tokenizer": TOKENIZER}, "must be a list"),
        (
            {"prompts": [[5], [7, tiny.VOCAB]]},
            f"Prompt 1 has the token id {tiny.VOCAB}, and the target knows ids from 0",
        ),
        ({"prompts": [[-1]]}, "the token id -1"),
        ({"prompts": [[{"content": "w4"}]], "tokenizer": TOKENIZER}, "chat template does not take"),
        ({"prompts": [[{"role": "user", "content": None}]], "tokenizer": TOKENIZER}, "chat template does not take"),
        ({"seed": 1.5}, "`seed` must be an integer, got 1.5"),
        ({"cactus_kl": 0.1}, "sets `cactus_kl` itself"),
        ({"speculation_kl": True}, "sets `speculation_kl` itself"),
        ({"eos_token_id": list(range(tiny.VOCAB))}, "No text has a drafted token behind its first one"),
    ),
)
def test_mistakes(options, words):
    with pytest.raises(ValueError, match=words):
        calibrate(**options)


@pytest.mark.parametrize(
    ("options", "words"),
    (
        ({"rules": (0.5,)}, "acceptance rules"),
        ({"rules": TopK(2)}, "`rules` must be a list"),
        ({"deltas": 0.1}, "`deltas` must be a list"),
        ({"prompts": [5, 6]}, "texts, chats .* or lists of token ids; got 5"),
        ({"prompts": [{"role": "user", "content": "w4"}], "tokenizer": TOKENIZER}, "texts, chats"),
        ({"prompts": ["w4"], "tokenizer": "name"}, "`tokenizer` must be the target's tokenizer"),
    ),
)
def test_mistakes_of_type(options, words):
    with pytest.raises(TypeError, match=words):
        calibrate(**options)


@pytest.mark.parametrize("make", (torch.tensor, np.array, iter))
def test_lists_may_be_tensors(make):
    few = {"prompts": [[5, 6], [7, 8]], "deltas": [0.0, 0.5]}
    assert calibrate(**{name: make(value) for name, value in few.items()}).table() == calibrate(**few).table()


def test_damaged_files(whole, tmp_path):
    """Lines that are not of this calibration are an error; they are not counted along."""
    path = tmp_path / "c.jsonl"
    whole.to_json(path)
    text = path.read_text()
    header, first, *rest = text.splitlines(keepends=True)
    damaged = {
        "prompt 9 is none of 5": text + first.replace('"prompt": 0', '"prompt": 9'),
        "prompt '0' is none of 5": text + first.replace('"prompt": 0', '"prompt": "0"'),
        "invalid for input of size 0": header + json.dumps({"prompt": 0, "rounds": [], "positions": []}) + "\n",
        "KeyError: 'num_prompts'": '{"settings": [], "longest": 3}\n',
        "KeyError: 'deltas'": '{"settings": [], "longest": 3, "num_prompts": 1}\n',
        "is no text in UTF-8": b"\xff\xfe",
    }
    for words, content in damaged.items():
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        for read in (Calibration.from_json, lambda path: calibrate(resume=path)):
            with pytest.raises(ValueError, match=words):
                read(path)
    path.write_text(header)
    with pytest.raises(ValueError, match="lacks 5 of 5 prompts"):
        Calibration.from_json(path)


def test_an_empty_file_is_a_new_one(whole, tmp_path):
    (tmp_path / "c.jsonl").touch()
    assert torch.equal(calibrate(resume=tmp_path / "c.jsonl").rounds, whole.rounds)
    assert Calibration.from_json(tmp_path / "c.jsonl").table() == whole.table()


def test_what_differs_is_told(whole, tmp_path):
    whole.to_json(tmp_path / "c.jsonl")
    with pytest.raises(ValueError, match=r"another `deltas` \(\[0.5\] instead of \[0.7\]\)"):
        calibrate(resume=tmp_path / "c.jsonl", deltas=(0.0, 0.1, 0.7))
    with pytest.raises(ValueError, match=r"another `settings` \(\[{'label': 'TopK\(k=2\)'.* instead of \[\]\)"):
        calibrate(resume=tmp_path / "c.jsonl", rules=())


@pytest.fixture(scope="module")
def folders(pair_folder: Path, tmp_path_factory) -> list[str]:
    """Options that name a tiny pair with one token a byte, and prompts."""
    prompts = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text * 3}) + "\n" for text in ("ab", "cde", "f", "gh", "ijk")))
    names = ["--model", str(pair_folder / "target"), "--assistant", str(pair_folder / "draft"), "--device", "cpu"]
    return [*names, "--prompts", str(prompts), "--max-new-tokens", "12", "--deltas", "0", "0.1", "0.5"]


def run(folders: list[str], *options: str) -> int:
    return cli.main(["calibrate", *folders, *options])


def test_command_as_json(folders, tmp_path):
    options = ["--kl", "0.05", "--acceptance", "0.5", "--check", "2", "--resume", str(tmp_path / "run.jsonl")]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert run(folders, "--json", *options, "--output", str(tmp_path / "config")) == 0
    assert out.getvalue().count("\n") == 1, "one object and nothing else"
    facts = json.loads(out.getvalue())
    first, second = facts["answers"]
    assert first["emitted_kl"]["value"] == pytest.approx(0.05) and facts["num_prompts"] == 3
    assert second["position_acceptance"]["value"] == pytest.approx(0.5)
    assert [each["num_prompts"] for each in facts["checks"]] == [2, 2]
    assert all(each["emitted_kl"]["value"] > 0 for each in facts["checks"])
    found = Calibration.from_json(tmp_path / "run.jsonl")
    assert found.delta_for(kl=0.05).delta == first["delta"]
    assert [line["label"] for line in facts["table"]] == [line.label for line in found.table()]

    config = GenerationConfig.from_pretrained(tmp_path / "config")
    assert (config.cactus_delta, config.num_assistant_tokens) == (first["delta"], 5)
    assert (config.temperature, config.do_sample, config.num_assistant_tokens_schedule) == (0.7, True, "constant")
    target, draft = tiny.pair("llama", vocab=260, eps=0.1)
    config.update(max_new_tokens=8, eos_token_id=None, pad_token_id=0)
    with enabled(target):
        call = {"assistant_model": draft, "return_dict_in_generate": True, "generator": [1]}
        output = target.generate(torch.tensor([[70, 71]]), generation_config=config, speculation_kl=True, **call)
        same = target.generate(torch.tensor([[70, 71]]), generation_config=config, cactus_delta=first["delta"], **call)
    assert output.speculation.emitted_kl > 0 and torch.equal(output.sequences, same.sequences)


def test_command_prints_a_table_and_plots(folders, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    costs = {"1": {"draft": [0.001, 0.002], "verify": [0.05, 0.05, 0.05]}}
    config = GenerationConfig(speculation_costs=costs)
    config._from_model_config = False
    config.save_pretrained(tmp_path)
    options = ["--costs", str(tmp_path), "--kl", "0.05", "--check", "1", "--plot", str(tmp_path / "c.png")]
    assert run(folders, *options, "--output", str(tmp_path / "fastest")) == 0
    out, err = capsys.readouterr()
    assert not err, "no terminal, so no progress bars"
    assert "Cactus(0.5)" in out and "TopK(k=5)" in out and "limit, slope 1" in out and "tokens/s" in out
    assert out.count("Reported on 1 other prompts") == 2
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    fastest = GenerationConfig.from_pretrained(tmp_path / "fastest")
    assert fastest.num_assistant_tokens == 2 and fastest.speculation_costs == costs


@pytest.mark.parametrize(
    ("options", "words"),
    (
        (["--check", "1"], "--check is for an answer"),
        (["--output", "x"], "--output is for an answer"),
        (["--num-prompts", "5", "--check", "1", "--kl", "0.1"], "5 prompts to calibrate and 1 to check"),
        (["--plot", "x.pdf"], "ends in .png"),
        (["--resume", "nowhere/x.jsonl"], "there is no folder nowhere"),
        (["--costs", "nowhere"], "nowhere"),
        (["--num-prompts", "2", "--check", "3", "--kl", "0.1", "--max-new-tokens", "240"], "The longest prompt"),
    ),
)
def test_command_mistakes(folders, options, words, capsys):
    assert run(folders, *options) == 2
    out, err = capsys.readouterr()
    assert words in err and err.count("\n") == 1 and not out


def test_an_answer_that_there_is_not_leaves_the_table(folders, capsys):
    """It takes a long time to find out."""
    assert run(folders, "--kl", "9") == 2
    out, err = capsys.readouterr()
    assert "Cactus(0.5)" in out and "KL 9 is not reached" in err and err.count("\n") == 1


def test_the_embedded_pair(real_pair):
    target, draft, tokenizer = real_pair
    found = cactus_hf.calibrate(
        target,
        draft,
        ["Why is the sky blue?", "List three uses of a paper clip."],
        tokenizer=tokenizer,
        deltas=(0.0, 0.1, 1.0),
        rules=(),
        max_new_tokens=12,
        temperature=0.7,
        top_k=20,
    )
    lossless, middle, large = found.table()[:3]
    assert lossless.emitted_kl.value < 1e-9 < middle.emitted_kl.value < large.emitted_kl.value
    assert lossless.position_acceptance.value < large.position_acceptance.value
    assert found.delta_for(kl=middle.emitted_kl.value).delta == pytest.approx(0.1)
