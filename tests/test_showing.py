"""`cactus_hf.show`: every token is there once, in its look; rows, prompts, figures; and what is no such output."""

from __future__ import annotations

import re
from html import unescape

import numpy as np
import pytest
import torch

import cactus_hf
import tiny
from cactus_hf import SpeculationStats, TokenKind
from cactus_hf.outputs import SpeculativeOutput


TOKENIZER = tiny.byte_tokenizer()
F, A, B, R, E, PAD = (int(kind) for kind in [*list(TokenKind)[1:], TokenKind.PAD])


def ids(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def counts(*values: int) -> torch.Tensor:
    return torch.tensor(values)


@pytest.fixture
def output() -> SpeculativeOutput:
    """Two rows: "sky" answers "blue" and an end, "is" (padded) answers "<i>$"."""
    sequences = [[*ids("sky"), *ids("blue"), tiny.EOS], [tiny.PAD, *ids("is"), *ids("<i>$"), tiny.PAD]]
    kinds = [[F, A, B, R, E], [F, R, A, E, PAD]]
    made = SpeculativeOutput(sequences=torch.tensor(sequences))
    made.speculation = SpeculationStats(
        drafted=counts(4, 2),
        verified=counts(4, 2),
        accepted=counts(2, 1),
        emitted=counts(5, 4),
        rounds=counts(2, 2),
        accepted_by_position=torch.tensor([[2, 0], [1, 0]]),
        kinds=torch.tensor(kinds, dtype=torch.int8),
        ball_kl_sum=torch.tensor([0.4, 0.8], dtype=torch.float64),
    )
    return made


def test_brackets_where_there_is_no_terminal(output, capsys) -> None:
    print(cactus_hf.show(output, TOKENIZER))
    assert capsys.readouterr().out == (
        "row 0: AL 1.00, acceptance 0.50\n> sky\nbl{u}[e]\n\n"
        "row 1: AL 0.50, acceptance 0.50\n> is\n<[i]><$>\n\n"
        "accepted   {kept thanks to the bonus}   [rejected and replaced]   <extra>\n"
        "9 tokens in 4 rounds: AL 0.75, acceptance 0.50, ball KL 0.200, emitted KL not measured\n"
    )


def test_one_row_has_no_heading_and_its_own_figures(output) -> None:
    shown = str(cactus_hf.show(output, TOKENIZER, rows=1, prompt=False))
    assert shown.startswith("<[i]><$>\n\n")
    assert shown.endswith("4 tokens in 2 rounds: AL 0.50, acceptance 0.50, ball KL 0.400, emitted KL not measured")


def test_measured_divergence_is_told_and_none_where_nothing_is_raised(output) -> None:
    zero = torch.zeros(2, dtype=torch.float64)
    stats = output.speculation
    measured = {"emitted_kl_sum": torch.tensor([0.6, 0.6]), "emitted_tv_sum": zero, "ball_kl_sum": zero}
    output.speculation = SpeculationStats(**{**vars(stats), **measured})
    assert str(cactus_hf.show(output, TOKENIZER)).endswith("acceptance 0.50, emitted KL 0.200 nats a position")


def test_colours_in_a_terminal(output, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    shown = repr(cactus_hf.show(output, TOKENIZER, rows=0))
    assert shown.startswith("\x1b[2msky\x1b[0mb\x1b[38;5;28ml\x1b[0m\x1b[38;5;130;4mu\x1b[0m\x1b[38;5;160;1me")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in repr(cactus_hf.show(output, TOKENIZER))


def test_lines_break_between_words_in_a_terminal(output, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr("shutil.get_terminal_size", lambda: type("Size", (), {"columns": 8}))
    prompt, answer = ids("the sky is"), ids(" blue")
    stats = {**vars(output.speculation), "kinds": torch.full((2, 5), A, dtype=torch.int8), "emitted": counts(5, 5)}
    output.speculation = SpeculationStats(**stats)
    output.sequences = torch.tensor([[*prompt, *answer]] * 2)
    assert str(cactus_hf.show(output, TOKENIZER, rows=0)).startswith("> the sky\n> is\n blue\n")


def test_a_page_has_the_same_text_escaped(output) -> None:
    page = cactus_hf.show(output, TOKENIZER)._repr_html_()
    texts = re.findall(r'<div class="text" dir="auto">(.*?)</div>', page, re.DOTALL)
    assert [unescape(re.sub("<.*?>", "", text)) for text in texts] == ["skyblue", "is<i>$"]
    assert '<span class="prompt">is</span>&lt;<b class="replaced" title="rejected and replaced">i</b>' in texts[1]
    assert '<u class="boosted" title="kept thanks to the bonus">u</u>' in texts[0]
    assert "mathjax_ignore" in page, "JupyterLab would set $...$ as a formula"
    assert page.count("<div") == page.count("</div>") and "9 tokens in 4 rounds" in page


@pytest.mark.parametrize(
    ("theme", "classes"), [("auto", "cactus-hf "), ("light", "cactus-hf light "), ("dark", "cactus-hf dark ")]
)
def test_themes(output, theme: str, classes: str) -> None:
    assert cactus_hf.show(output, TOKENIZER, theme=theme)._repr_html_().startswith(f'<div class="{classes}tex2jax')


def test_an_output_of_generate(capsys) -> None:
    target, draft = tiny.pair("llama", vocab=260, eps=0.1)
    target = cactus_hf.enable(target)
    inputs = TOKENIZER(["sky", "blue sky"], return_tensors="pt", padding=True, return_token_type_ids=False)
    options = {"do_sample": True, "max_new_tokens": 24, "return_dict_in_generate": True}
    output = target.generate(**inputs, **options, assistant_model=draft, cactus_delta=0.5, speculation_kl=True)
    shown = cactus_hf.show(output, TOKENIZER)
    texts = TOKENIZER.batch_decode(output.sequences, skip_special_tokens=True)
    for row, text in zip(shown.rows, texts, strict=True):
        assert text.startswith(row.prompt + "".join(piece.text for piece in row.pieces))
    assert "nats a position" in str(shown)
    with pytest.raises(ValueError, match=r"got GenerateDecoderOnlyOutput without it. Pass `cactus_delta`"):
        cactus_hf.show(target.generate(**inputs, **options), TOKENIZER)
    with pytest.raises(ValueError, match=r"got a tensor of shape \[2, 3\]. .*return_dict_in_generate=True"):
        cactus_hf.show(torch.zeros(2, 3), TOKENIZER)


@pytest.mark.parametrize(
    "rows", [torch.tensor([1]), torch.tensor(1), np.int64(1), np.array([1]), range(1, 2)], ids=repr
)
def test_rows_of_other_types(output, rows) -> None:
    assert str(cactus_hf.show(output, TOKENIZER, rows=rows)) == str(cactus_hf.show(output, TOKENIZER, rows=1))


@pytest.mark.parametrize("rows", [2, -1, [], [0, 7], True, [True], "0", 1.0, [1.0], [None], np.array([0.5])], ids=repr)
def test_rows_that_do_not_exist(output, rows) -> None:
    with pytest.raises(ValueError, match="`rows` are numbers from 0 to 1"):
        cactus_hf.show(output, TOKENIZER, rows=rows)


def test_other_mistakes(output) -> None:
    with pytest.raises(TypeError, match="a method `decode`, got SpeculativeOutput"):
        cactus_hf.show(output, output)
    with pytest.raises(ValueError, match="auto, light, dark, got 'solar'"):
        cactus_hf.show(output, TOKENIZER, theme="solar")
