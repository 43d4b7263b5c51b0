"""Engines of Model Runner V1 that follow a rule: the law of short texts by chi-square, and what a request may ask."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_engine
import torch
from tiny_engine import LEVEL, VOCAB, chance, exact_law, frequencies, law_of, texts

from cactus_hf import Cactus


pytest.importorskip("vllm.version", reason="tests/vllm/run")  # "vllm" alone would be this folder

from vllm import SamplingParams  # noqa: E402
from vllm.exceptions import VLLMValidationError  # noqa: E402


TEMPERATURE = 0.8
NUM_TEXTS = 3000


@pytest.fixture(scope="module")
def llm(models: Path):
    options = {"per_request_spec_decode_metrics": "summary", "disable_log_stats": False}
    with tiny_engine.engine(models, "cactus:0.5", **options) as llm:
        yield llm


def params(extra_args: dict[str, Any] | None = None, **options: Any) -> SamplingParams:
    options = {"temperature": TEMPERATURE, "max_tokens": 3, "ignore_eos": True, "detokenize": False, **options}
    return SamplingParams(**options, extra_args=extra_args)


def warmed(seed: int, keep: int = VOCAB):
    """The law of a model at the temperature, of its `keep` most likely tokens."""

    def change(logits: torch.Tensor) -> torch.Tensor:
        return (logits / TEMPERATURE).masked_fill(logits < logits.topk(keep).values[-1], -torch.inf)

    return law_of(seed, change)


def one_hot(seed: int):
    def law(text: tuple[int, ...]) -> list[float]:
        return torch.nn.functional.one_hot(torch.tensor(law_of(seed)(text)).argmax(), VOCAB).tolist()

    return law


@pytest.mark.parametrize(
    ("extra_args", "rule"),
    [(None, Cactus(0.5)), ({"cactus_delta": 0}, Cactus(0.0)), ({"cactus_kl": 0.02}, Cactus(kl_budget=0.02))],
)
def test_law(llm: Any, extra_args: dict[str, Any] | None, rule: Cactus):
    counts = frequencies(texts(llm, params(extra_args), NUM_TEXTS), 3)
    laws = [exact_law(warmed(0), warmed(1), each, 3) for each in (rule, Cactus(0.0))]
    assert chance(counts, laws[0]) > LEVEL
    # The comparison can tell the rule from lossless sampling
    assert rule == Cactus(0.0) or chance(counts, laws[1]) < LEVEL


def test_law_of_mixed_deltas_in_one_batch(llm: Any):
    rules = [Cactus(0.0), Cactus(0.1), Cactus(2.0)]
    kinds = [params({"cactus_delta": rule.delta}, top_k=6) for rule in rules]
    found = texts(llm, kinds * NUM_TEXTS)
    for place, rule in enumerate(rules):
        law = exact_law(warmed(0, keep=6), warmed(1), rule, 3)
        assert chance(frequencies(found[place::3], 3), law) > LEVEL


def test_more_is_accepted_the_larger_delta_is(llm: Any):
    lengths = []
    for delta in (0.0, 0.05, 0.5, float("inf")):
        prompt = {"prompt_token_ids": tiny_engine.PROMPT}
        outputs = llm.generate([prompt] * 60, params({"cactus_delta": delta}, max_tokens=40), use_tqdm=False)
        stats = [output.outputs[0].spec_decode_metrics for output in outputs]
        lengths.append(sum(s.to_dict()["num_accepted_draft_tokens"] / sum(s.histogram) for s in stats) / len(stats))
    assert lengths == sorted(lengths)
    assert min(b - a for a, b in zip(lengths[:-1], lengths[1:], strict=True)) > 0.1
    assert lengths[-1] == pytest.approx(tiny_engine.NUM_DRAFTS, abs=0.05)  # but for the last round of a text


@pytest.mark.parametrize(
    ("extra_args", "message"),
    [
        ({"cactus_delta": -0.1}, "number of nats"),
        ({"cactus_delta": float("nan")}, "number of nats"),
        ({"cactus_delta": "0.5"}, "number of nats"),
        ({"cactus_delta": True}, "number of nats"),
        ({"cactus_kl": [0.5]}, "number of nats"),
        ({"cactus_detla": 0.5}, "Did you mean 'cactus_delta'"),
        ({"cactus_delta": 0.5, "cactus_kl": 0.5}, "both given"),
    ],
)
def test_a_request_that_cannot_be_is_refused(llm: Any, extra_args: dict[str, Any], message: str):
    before = llm.collective_rpc("cactus_statistics")
    with pytest.raises(VLLMValidationError, match=message):
        texts(llm, params(extra_args), 1)
    assert llm.collective_rpc("cactus_statistics") == before
    assert len(texts(llm, params({"other": 1}), 1)[0]) == 3  # the engine goes on


def test_law_of_greedy_drafts(models: Path):
    with tiny_engine.engine(models, "cactus:0", "greedy") as llm:
        found = {delta: texts(llm, params({"cactus_delta": delta}), NUM_TEXTS) for delta in (0.0, 0.5)}
    laws = {delta: exact_law(warmed(0), one_hot(1), Cactus(delta), 3) for delta in found}
    for delta, text in found.items():
        assert chance(frequencies(text, 3), laws[delta]) > LEVEL
    assert chance(frequencies(found[0.5], 3), laws[0.0]) < LEVEL


def test_requests_with_random_parameters(models: Path):
    """In a batch too small for them, with a cache too small for the batch, so that rows come, go and are preempted."""
    options = {"max_num_seqs": 12, "num_gpu_blocks_override": 20, "block_size": 32, "disable_log_stats": False}
    chosen = random.Random(0)
    kinds = []
    for _ in range(200):
        delta = chosen.choice([None, 0.0, 0.05, 0.5, 2.0, float("inf")])
        kinds.append(
            params(
                None if delta is None else {"cactus_delta": delta}, max_tokens=chosen.randint(1, 100),
                temperature=chosen.choice([0.0, 0.5, 1.0]), top_k=chosen.choice([0, 0, 2, 5]),
                seed=chosen.choice([None, 3]), top_p=chosen.choice([1.0, 1.0, 0.9]),
                presence_penalty=chosen.choice([0.0, 0.0, 0.5]),
            )
        )  # fmt: skip
    prompts = [[chosen.randrange(VOCAB) for _ in range(chosen.randint(1, 20))] for _ in kinds]
    with tiny_engine.engine(models, "cactus:0.5", per_request_spec_decode_metrics="summary", **options) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], kinds, use_tqdm=False)
        preempted = next(metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions")
    assert preempted > 0
    histograms = []
    for prompt, kind, output in zip(prompts, kinds, outputs, strict=True):
        tokens = output.outputs[0].token_ids
        assert len(tokens) == kind.max_tokens
        if kind.presence_penalty == 0:
            assert_on_support(prompt, tokens, kind)
            if kind.temperature > 0 and kind.top_k == 0 and kind.top_p == 1 and kind.extra_args is not None:
                histograms.append((kind.extra_args["cactus_delta"], output.outputs[0].spec_decode_metrics.histogram))
    # At delta inf all drafts of a round are kept, or none where vLLM has lost their law; at the others some are kept
    unbounded = [histogram for delta, histogram in histograms if delta == float("inf")]
    others = [histogram for delta, histogram in histograms if delta != float("inf")]
    assert sum(histogram[1] for histogram in unbounded) == 0
    assert sum(histogram[2] for histogram in unbounded) > 20
    assert sum(histogram[1] for histogram in others) > 20


def assert_on_support(prompt: list[int], tokens: list[int], kind: SamplingParams) -> None:
    with torch.no_grad():
        logits = tiny_engine.model(0)(torch.tensor([[*prompt, *tokens[:-1]]])).logits[0, len(prompt) - 1 :]
    logits = logits.double()
    kept = 1 if kind.temperature == 0 else kind.top_k or VOCAB
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])
    # A small margin, as vLLM's sums round otherwise
    assert (chosen >= logits.topk(kept).values[:, -1:] - 1e-3).all()


@pytest.mark.parametrize("drafts", ["probabilistic", "ngram"])
def test_three_processes(models: Path, tmp_path: Path, drafts: str):
    """Main, engine core and worker, each with the plugin from its entry point; the last two are spawned."""
    environment = {
        **os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "CACTUS_HF_VLLM": "cactus:0.5",
    }  # fmt: skip
    script, report = Path(__file__).with_name("three_processes.py"), tmp_path / "report.json"
    command = [sys.executable, script, models, drafts, report]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    result = json.loads(report.read_text())
    assert len(set(result["processes"])) == 3
    if drafts == "ngram":
        laws = [tiny_engine.exact_law_of_look_up(warmed(0), Cactus(delta), 3) for delta in (0.5, 0.0)]
    else:
        laws = [exact_law(warmed(0), warmed(1), Cactus(delta), 3) for delta in (0.5, 0.0)]
    ours, lossless = (
        frequencies([tuple(text) for text in result["texts"][name]], 3) for name in ("default", "lossless")
    )
    assert chance(ours, laws[0]) > LEVEL > chance(ours, laws[1])
    assert chance(lossless, laws[1]) > LEVEL
    assert result["statistics"]["rule"] == "cactus:0.5"
    assert result["statistics"]["ball_kl"] > 0
