"""What asks for a rule, and what is refused before an engine starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


pytest.importorskip("vllm.version", reason="tests/vllm/run")  # "vllm" alone would be this folder

import tiny_engine  # noqa: E402
import vllm  # noqa: E402
from vllm import SamplingParams  # noqa: E402
from vllm.exceptions import VLLMValidationError  # noqa: E402

from cactus_hf import Cactus, Lenience  # noqa: E402
from cactus_hf.integrations import vllm as plugin  # noqa: E402


def configured(folder: Path, rule: Any, **changes: Any) -> Any:
    """The configuration that `LLM` makes of its arguments."""
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(**tiny_engine.engine_options(folder, rule, **changes)).create_engine_config()


def test_the_rule_is_asked_for_by_option_or_environment(models: Path, monkeypatch: pytest.MonkeyPatch):
    assert plugin.asked_rule(configured(models, None)) is None
    assert plugin.asked_rule(configured(models, "cactus:0.5")) == Cactus(0.5)
    monkeypatch.setenv("CACTUS_HF_VLLM", "kl:0.1")
    config = configured(models, None, additional_config={"other": 1})
    assert config.additional_config == {"other": 1, "cactus_hf": "kl:0.1"}  # so it reaches workers elsewhere
    assert plugin.asked_rule(config) == Cactus(kl_budget=0.1)
    assert plugin.asked_rule(configured(models, "kl:0.1")) == Cactus(kl_budget=0.1)
    monkeypatch.setenv("CACTUS_HF_VLLM", "")
    assert plugin.asked_rule(configured(models, None)) is None


@pytest.mark.parametrize(
    ("rule", "changes", "message"),
    [
        ("cacti:1", {}, "no method called 'cacti:1'"),
        ("cactus", {}, "needs a number"),
        ("cactus:-1", {}, "0 \\(lossless\\) or more"),
        (0.5, {}, "must name a rule"),
        ("cactus:1", {"speculative_config": None}, "nothing drafts"),
    ],
)
def test_refused_before_an_engine_starts(models: Path, rule: Any, changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        configured(models, rule, **changes)


@pytest.mark.parametrize("method", ["synthetic", "block", "fly"])
def test_other_ways_to_accept_drafts_are_refused(models: Path, method: str):
    config = configured(models, "cactus:1")
    config.speculative_config.rejection_sample_method = method
    with pytest.raises(ValueError, match=f"'{method}', another way to accept"):
        plugin.check_engine(config)


def test_two_rules_are_refused(models: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CACTUS_HF_VLLM", "cactus:1")
    assert plugin.asked_rule(configured(models, "cactus:1")) == Cactus(1.0)
    with pytest.raises(ValueError, match="'cactus:1' and .*'cactus:2'"):
        configured(models, "cactus:2")


def test_other_versions_are_refused_only_where_a_rule_is_asked_for(models: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(vllm, "__version_tuple__", (0, 99, 0))
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    configured(models, None)
    with pytest.raises(ValueError, match="in vLLM 0.32 and 0.33; this is 0.99.0"):
        configured(models, "cactus:1")


@pytest.mark.parametrize(
    ("default", "extra_args", "rule"),
    [
        ("cactus:1", None, Cactus(1.0)),
        ("cactus:1", {"other": 3}, Cactus(1.0)),
        ("lenience:0.5", None, Lenience(0.5)),
        ("lenience:0.5", {"cactus_delta": 0}, Cactus(0.0)),
        ("sps", {"cactus_kl": 0.25}, Cactus(kl_budget=0.25)),
        ("cactus:1", {"cactus_delta": float("inf")}, Cactus(float("inf"))),
    ],
)
def test_the_rule_of_a_request(default: str, extra_args: dict[str, Any] | None, rule: Any):
    from cactus_hf.evaluation.methods import parse_rule

    assert plugin.request_rule(SamplingParams(extra_args=extra_args), parse_rule(default)) == rule


def engine_of(rule: str | None, draft_sample_method: str = "greedy") -> Any:
    speculative = SimpleNamespace(draft_sample_method=draft_sample_method)
    config = {} if rule is None else {"cactus_hf": rule}
    return SimpleNamespace(additional_config=config, speculative_config=speculative)


def test_requests_that_are_refused():
    with pytest.raises(VLLMValidationError, match="cactus_delta: this engine runs no rule"):
        plugin.check_request(engine_of(None), SamplingParams(extra_args={"cactus_delta": 0.5}))
    plugin.check_request(engine_of(None), SamplingParams(extra_args={"other": 0.5}))
    plugin.check_request(engine_of("lenience:0.5"), vllm.PoolingParams())


def test_grammars_and_rules():
    """What vLLM takes back was drawn, so what is left is not the draft's law any more. One-hot drafts are exact."""

    def ask(rule: str, drafts: str, **options: Any) -> None:
        grammar = vllm.sampling_params.StructuredOutputsParams(regex="a+")
        plugin.check_request(engine_of(rule, drafts), SamplingParams(structured_outputs=grammar, **options))

    ask("cactus:0.5", "greedy")
    ask("cactus:0.5", "probabilistic", extra_args={"cactus_delta": 0})
    ask("lenience:0.5", "probabilistic", temperature=0)
    for rule, drafts in (("lenience:0.5", "greedy"), ("cactus:0.5", "probabilistic")):
        with pytest.raises(VLLMValidationError, match="structured outputs are not exact with"):
            ask(rule, drafts)


def test_without_a_rule_vllm_is_left_alone(models: Path):
    """In a process of its own, whose vLLM no engine of these tests has touched."""
    code = f"""
import sys
from pathlib import Path
import tiny_engine
from vllm import SamplingParams

with tiny_engine.engine(Path({str(models)!r}), None) as llm:
    print(tiny_engine.texts(llm, SamplingParams(max_tokens=3, detokenize=False), 1))
    logits_processors = llm.llm_engine.model_executor.driver_worker.model_runner.input_batch.logitsprocs
    from vllm.v1.sample import rejection_sampler

    assert rejection_sampler.rejection_sample.__module__ == rejection_sampler.__name__
    assert not logits_processors.argmax_invariant
    assert "cactus_hf.integrations.vllm" in sys.modules
    assert not {{"cactus_hf.integrations.vllm_v1", "cactus_hf.integrations.vllm_v2"}} & set(sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parent)
    assert run.returncode == 0, run.stderr[-3000:]
