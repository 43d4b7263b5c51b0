"""`cactus-hf passes` on a tiny model."""

from __future__ import annotations

import json

import pytest
import torch

import tiny
from cactus_hf.cli import main
from cactus_hf.packed_layers import missing_fbgemm
from cactus_hf.passes import KINDS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny.model("llama").save_pretrained(path)
    return str(path)


def test_table(folder, capsys):
    assert main(["passes", "--model", folder, "--repeats", "1", "--widths", "1x1", "2x3", "--cached", "4"]) == 0
    description, head, *lines, difference = capsys.readouterr().out.splitlines()
    assert "float32" in description
    assert head.split()[-2:] == ["1x1", "2x3"]
    assert [line[:7].strip(", ") for line in lines] == ["ordinar", "ordinar", "packed", "packed"]
    assert all(len(line.split()) == 4 for line in lines)
    assert difference.startswith("packed against ordinary: logits differ by at most ")
    assert difference.endswith("laws overlap by 1.00000")


@pytest.mark.skipif(missing_fbgemm() is not None, reason="needs FBGEMM")
def test_kinds(folder, capsys):
    kinds = [kind for kind in KINDS if kind != "bfloat16" or torch.ops.mkldnn._is_mkldnn_bf16_supported()]
    options = ["--repeats", "1", "--widths", "1x2", "--cached", "4", "--kinds", *kinds]
    assert main(["passes", "--model", folder, *options, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert list(result["ms"]) == kinds
    found = result["differences"]
    assert found["packed"]["logits"] < 1e-4 < found["float16"]["logits"], "rounding of sums, and of weights"
    assert 0.99 < found["float16"]["overlap"] < 0.99999


@pytest.mark.parametrize(
    "options, said",
    [
        (["--draft", "--model", "x"], "give either"),
        (["--dtype", "bfloat16", "--kinds", "float16"], "leave it or --dtype bfloat16 out"),
    ],
)
def test_options_that_do_not_go_together(options, said, capsys):
    assert main(["passes", *options]) == 2
    assert said in capsys.readouterr().err


def test_json(folder, capsys):
    options = ["--repeats", "2", "--widths", "1x2", "--cached", "1", "--dtype", "float32", "--json"]
    assert main(["passes", "--model", folder, *options]) == 0
    result = json.loads(capsys.readouterr().out)
    assert {kind: {name: len(each) for name, each in times.items()} for kind, times in result["ms"].items()} == {
        "ordinary": {"1x2": 2},
        "packed": {"1x2": 2},
    }
    assert 0 <= result["differences"]["packed"]["logits"] < 1e-4  # rounding


def test_a_folder_that_is_not_there(capsys):
    assert main(["passes", "--model", "./nowhere"]) == 2
    assert "There is no folder ./nowhere" in capsys.readouterr().err


def test_more_tokens_than_the_model_holds(folder, capsys):
    assert main(["passes", "--model", folder, "--cached", "100000"]) == 2
    assert "and the target holds" in capsys.readouterr().err


@pytest.mark.parametrize("text", ("8", "0x1", "1xa", "1x2x3"))
def test_a_width_that_is_none(text, capsys):
    with pytest.raises(SystemExit):
        main(["passes", "--widths", text])
    assert "such as 8x5" in capsys.readouterr().err
