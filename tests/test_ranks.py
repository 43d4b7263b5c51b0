"""Several processes at one call; each launch costs seconds, so one launch serves many tests.

What the processes do stands in tests/processes.py; what they must return is computed here, in one process.
"""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import cactus_hf
import processes
import tiny
from cactus_hf.ranks import Ranks
from cactus_hf.validation import check_ranks


ROOT = Path(__file__).parents[1]
TIMEOUT = 300  # seconds; a launch takes some twenty, and a hang takes for ever
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc_per_node", "2")
ACCELERATE = ("accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0")

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="this torch has no gloo, by which processes communicate on a CPU",
)


def launch(launcher: tuple[str, ...], *arguments: str | Path) -> str:
    """What two processes print; a hang or a failure of one fails the test."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", *launcher, *map(str, arguments)]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            process.terminate()  # the launcher ends what it started; a kill would leave that behind
            pytest.fail(f"the processes hang: {process.communicate()[1][-4000:]}")
    assert process.returncode == 0, stderr[-6000:]
    return stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    processes.save_models(folder)
    return folder


def results_of(mode: str, folder: Path) -> list[Any]:
    launch(TORCHRUN, ROOT / "tests" / "processes.py", mode, folder)
    return [torch.load(folder / f"{mode}-{rank}.pt") for rank in range(2)]


def alone(name: str, calls: dict[str, dict[str, Any]], rank: int) -> dict[str, Any]:
    """What the calls return in one process."""
    target, draft = processes.models(name)
    return processes.run(cactus_hf.enable(copy.deepcopy(target)), draft, calls, rank)


@pytest.fixture(scope="module")
def parallel_results(folder: Path) -> list[Any]:
    return results_of("tensor_parallel", folder)


@pytest.fixture(scope="module")
def synced_results(folder: Path) -> list[Any]:
    return results_of("synced", folder)


@pytest.fixture(scope="module")
def first_decides() -> dict[str, Any]:
    """What the first of the tensor-parallel processes would return alone."""
    return alone("qwen3", processes.parallel_calls(0), 0)


class TestTensorParallel:
    @pytest.mark.parametrize("layout", ("whole draft", "parallel draft", "pipeline"))
    @pytest.mark.parametrize("call", processes.parallel_calls(0))
    def test_every_process_returns_what_the_first_decides(self, parallel_results, first_decides, layout, call):
        if layout == "pipeline" and call == "early exit":
            pytest.skip("is refused")
        for rank in range(2):
            assert parallel_results[rank][layout][call] == first_decides[call]

    def test_greedy_text_is_that_of_plain_decoding(self, first_decides):
        target = processes.models("qwen3")[0]
        prompts = tiny.Prompts(**processes.prompts(5, 17, 9))
        plain = tiny.plain_greedy(target, prompts, processes.GREEDY["max_new_tokens"])
        assert [text[17:] for text in first_decides["greedy"][0]] == [text.tolist() for text in plain]

    @pytest.mark.parametrize("case", ("prompts", "lengths", "criteria"))
    def test_processes_that_were_given_different_rows_all_refuse(self, parallel_results, case):
        for rank in range(2):
            assert "different prompts or options: give all of them" in parallel_results[rank][f"different {case}"]


# What processes.py calls its pairs of models, and their names there
PAIRS = {"qwen3": "qwen3", "untested": "qwen3", "outgrown": "outgrown", "bloom": "bloom"}


class TestSynced:
    @pytest.mark.parametrize("rank", range(2))
    @pytest.mark.parametrize("name", PAIRS)
    @pytest.mark.filterwarnings("ignore:The rows of this batch")
    def test_text_and_cache_are_those_of_the_process_alone(self, synced_results, name, rank):
        calls = processes.one_row_calls(rank) if name == "bloom" else processes.synced_calls(rank)
        found = synced_results[rank][name]
        calls = {call: options for call, options in calls.items() if call in found}
        expected = alone(PAIRS[name], calls, rank)
        assert calls and found.keys() == expected.keys() | {"passes"}
        for call, value in expected.items():
            if call.endswith("cache"):  # rounding: a pass made for others computes a state again, in another shape
                torch.testing.assert_close(found[call], value, atol=1e-4, rtol=1e-4)
            else:
                assert found[call] == value, call

    @pytest.mark.parametrize("name", PAIRS)
    def test_all_make_the_same_passes(self, synced_results, name):
        assert synced_results[0][name]["passes"] == synced_results[1][name]["passes"]

    def test_disabled_after_sharding(self, synced_results):
        assert synced_results[0]["disabled"] == synced_results[1]["disabled"] == ["FSDPBloomForCausalLM", True]

    def test_refused(self):
        ranks = Ranks(is_synced=True)
        with pytest.raises(ValueError, match="synced_gpus.*prefill_chunk_size.*leave it out"):
            check_ranks(ranks, [], False, GenerationConfig(prefill_chunk_size=4))
        with pytest.raises(ValueError, match="read the target's states.*assistant_model"):
            check_ranks(ranks, [], True, GenerationConfig())
        with pytest.raises(ValueError, match="assistant_early_exit.*pipeline"):
            check_ranks(Ranks(has_stages=True), [], False, GenerationConfig(assistant_early_exit=1))


PROMPTS = ("w10 w20 w30", "w40", "w50 w60 w70 w80 w90")


class TestSharedPrompts:
    @pytest.fixture
    def expected(self):
        target, draft = processes.models("qwen3")
        target, tokenizer = cactus_hf.enable(copy.deepcopy(target)), tiny.word_tokenizer(processes.VOCAB)
        texts = []
        for seed, prompt in enumerate(PROMPTS):
            input_ids = tokenizer(prompt, return_tensors="pt").input_ids
            output = target.generate(
                input_ids,
                assistant_model=draft,
                do_sample=True,
                cactus_delta=0.5,
                generator=[seed],
                max_new_tokens=32,
            )
            texts += tokenizer.batch_decode(output, skip_special_tokens=True)
        return texts

    @pytest.mark.parametrize("launcher", (TORCHRUN, ACCELERATE), ids=("torchrun", "accelerate"))
    def test_the_example_of_the_docs(self, folder, expected, launcher):
        pytest.importorskip("accelerate", reason="the example shares prompts out by accelerate")
        document = (ROOT / "docs" / "multiple_processes.md").read_text()
        code = re.search(r"<!-- file: share_prompts.py -->\n```python\n(.*?)```", document, re.DOTALL)
        script = folder / "share_prompts.py"
        script.write_text(code[1])
        printed = launch(launcher, script, folder / "target", folder / "draft", *PROMPTS)
        # In torch 2.9 gloo greets first, from two processes at a time, in pieces of lines
        assert printed.splitlines()[-len(expected) :] == expected


class TestEvaluation:
    def test_processes_share_the_questions(self, pair_folder, tmp_path):
        """`accelerate launch -m cactus_hf.cli eval`: each process writes a file, the first reports on all."""
        pytest.importorskip("lm_eval", reason="the extra `eval` is not installed")
        data, output = tmp_path / "gsm8k.jsonl", tmp_path / "answers.jsonl"
        data.write_text("".join(json.dumps({"question": str(n), "answer": f"#### {n}"}) + "\n" for n in range(5)))
        models = ("--model", pair_folder / "target", "--assistant", pair_folder / "draft", "--device", "cpu")
        options = (
            "--data",
            data,
            "--output",
            output,
            "--batch-size",
            "2",
            "--max-new-tokens",
            "8",
            "--methods",
            "plain",
            "sps",
        )
        printed = launch((*ACCELERATE, "-m"), "cactus_hf.cli", "eval", *models, *options)
        assert [line.split()[:3] for line in printed.splitlines() if line.startswith(("plain", "sps"))] == [
            ["plain", "-", "5"],
            ["sps", "10", "5"],
        ]
        written = [len(path.read_text().splitlines()) - 1 for path in sorted(tmp_path.glob("answers.jsonl*"))]
        assert written == [6, 4], "batches 0 and 2 of three, and batch 1"
