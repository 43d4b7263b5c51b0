"""`cactus-hf plot scores`, `ablation` and `deltas` on lines as `eval --json` writes them."""

from __future__ import annotations

import json

import pytest

from cactus_hf import cli
from cactus_hf.plotting.scores import PICTURES


pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")


def line(method: str, score: float, acceptance: float | None, **changed) -> dict:
    facts = {"task": "gsm8k", "method": method, "num_assistant_tokens": 10, "questions": 40, "score": score}
    facts |= {"error": 0.05, "acceptance": acceptance, "accepted_length": 5.0, "tokens_per_second": 20.0}
    return facts | {"settings": {"models": "/folder/target + /folder/draft"}} | changed


LINES = [
    line("plain", 0.5, None, accepted_length=None),
    line("sps", 0.52, 0.8),
    line("cactus:0.5", 0.51, 0.9),
    line("cactus:inf", 0.4, 0.95),
    line("mixture:0.5", 0.4, 0.9, questions=38),
    line("other:1", 0.4, 0.9),
]


def write(path, lines) -> str:
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return str(path)


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_have_a_panel_for_each_task_and_pair(name, tmp_path):
    image = pytest.importorskip("PIL.Image")
    widths = []
    for number, lines in enumerate((LINES, LINES + [each | {"task": "ifeval"} for each in LINES])):
        output = tmp_path / f"{number}.png"
        assert cli.main(["plot", name, write(tmp_path / "a.jsonl", lines), "--output", str(output)]) == 0
        widths.append(image.open(output).width)
    assert widths[1] > 1.5 * widths[0]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (LINES[1:], "the target alone"),
        ([], "no lines"),
        ([{"task": "gsm8k"}], "line 1 is not of"),
        ([LINES[0] | {"error": None}], "Ask more questions"),
        ([LINES[0] | {"error": 0.0}], "Ask more questions"),
        ([LINES[0] | {"score": None}], "score is None"),
        ([LINES[0] | {"method": 5}], "method is 5"),
        ([LINES[0] | {"settings": {"models": 5}}], "pair is 5"),
        ([{k: v for k, v in LINES[0].items() if k != "questions"}], "KeyError('questions')"),
    ],
)
def test_files_that_cannot_be_drawn(lines, message, tmp_path, capsys):
    assert cli.main(["plot", "scores", write(tmp_path / "a.jsonl", lines), "--output", str(tmp_path / "a.png")]) == 2
    assert message in capsys.readouterr().err


def test_errors_and_deltas_that_a_picture_needs(tmp_path, capsys):
    """Only `scores` divides by the target's own error."""
    output = ["--output", str(tmp_path / "a.png")]
    lossless = write(tmp_path / "a.jsonl", [LINES[0] | {"error": 0.0}, *LINES[1:]])
    for name in ("ablation", "deltas"):
        assert cli.main(["plot", name, lossless, *output]) == 0
        one = write(tmp_path / "b.jsonl", [each | {"error": None} for each in LINES])
        assert cli.main(["plot", name, one, *output]) == 2 and "have no error" in capsys.readouterr().err
    for lines in (LINES[:1], [LINES[0], LINES[3], LINES[4]]):
        assert cli.main(["plot", "deltas", write(tmp_path / "c.jsonl", lines), *output]) == 2
        assert "no finite delta" in capsys.readouterr().err


@pytest.mark.parametrize("name", PICTURES)
def test_draft_lengths_are_kept_apart(name):
    from matplotlib.figure import Figure

    two = [LINES[0] | {"num_assistant_tokens": None}]
    two += [each | {"num_assistant_tokens": m} for m in (10, 4) for each in LINES[1:5]]
    panel = Figure().subplots()
    PICTURES[name][0](panel, two)
    labels = {text.get_text() for text in panel.get_legend().get_texts()}
    expected = {"4 drafts", "10 drafts"} if name == "deltas" else {"cactus, 4 drafts", "cactus, 10 drafts"}
    assert expected <= labels


def test_a_folder_that_is_not_there(tmp_path, capsys):
    output = str(tmp_path / "nowhere" / "a.png")
    assert cli.main(["plot", "scores", write(tmp_path / "a.jsonl", LINES), "--output", output]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_the_name_of_a_picture_ends_in_png(tmp_path, capsys):
    assert cli.main(["plot", "scores", write(tmp_path / "a.jsonl", LINES), "--output", str(tmp_path / "a.svg")]) == 2
    assert ".png" in capsys.readouterr().err
