"""Engines with tiny models of 8 tokens, and the exact law of what they emit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import reference
import torch
from families import ARCHITECTURES
from rounds import round_law
from torch import Tensor
from transformers import PreTrainedModel

from cactus_hf import AcceptanceRule


VOCAB = 8
PROMPT = [3, 5, 2, 6]
NUM_DRAFTS = 2
LEVEL = 1e-4  # a right sampler fails a comparison of frequencies with this probability


@cache
def model(seed: int) -> PreTrainedModel:
    """Heads of 32 numbers, the least that vLLM's attention on a CPU takes; every token has some probability."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    return ARCHITECTURES["llama"].build(seed=seed, vocab=VOCAB, logit_scale=1.2, head_dim=32, **sizes)


def save_models(folder: Path) -> None:
    for seed, name in enumerate(("target", "draft")):
        model(seed).save_pretrained(folder / name)


DRAFTS = {
    "probabilistic": {"method": "draft_model", "draft_sample_method": "probabilistic"},
    "greedy": {"method": "draft_model", "draft_sample_method": "greedy"},
    "ngram": {"method": "ngram", "prompt_lookup_max": 2, "prompt_lookup_min": 1},
}


def engine_options(folder: Path, rule: str | None, drafts: str = "probabilistic", **options: Any) -> dict[str, Any]:
    """Arguments of `LLM`."""
    speculative = {"num_speculative_tokens": NUM_DRAFTS, **DRAFTS[drafts]}
    if drafts != "ngram":
        speculative["model"] = str(folder / "draft")
    return {
        "model": str(folder / "target"),
        "speculative_config": speculative,
        "additional_config": {} if rule is None else {"cactus_hf": rule},
        "distributed_executor_backend": "uni",
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 128,
        "max_num_seqs": 256,
        "skip_tokenizer_init": True,
        **options,
    }


@contextmanager
def engine(folder: Path, rule: str | None, drafts: str = "probabilistic", **options: Any):
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    llm = LLM(**engine_options(folder, rule, drafts, **options))
    yield llm
    del llm
    cleanup_dist_env_and_memory()


def texts(llm: Any, params: Any, count: int | None = None, prompt: Sequence[int] = PROMPT) -> list[tuple[int, ...]]:
    """New tokens of `count` requests alike, or of one for each of a list of parameters."""
    prompts = [{"prompt_token_ids": list(prompt)}] * (len(params) if count is None else count)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [tuple(output.outputs[0].token_ids) for output in outputs]


def law_of(seed: int, change: Callable[[Tensor], Tensor] = lambda logits: logits) -> Callable:
    """Probabilities behind the prompt and some new tokens, as `change` makes them of the logits."""

    @torch.no_grad()
    def law(text: tuple[int, ...]) -> list[float]:
        logits = model(seed)(torch.tensor([[*PROMPT, *text]])).logits[0, -1].double()
        return change(logits).softmax(-1).tolist()

    return law


def exact_law(target: Callable, draft: Callable, rule: AcceptanceRule, num_tokens: int) -> Tensor:
    """Of the first tokens, a dimension each."""
    law = torch.zeros([VOCAB] * num_tokens, dtype=torch.float64)
    for text, chance in round_law(target, draft, rule, NUM_DRAFTS, num_tokens).items():
        law[text] = chance
    return law


def look_up(tokens: list[int]) -> list[int]:
    """What vLLM's n-grams of 2 tokens or 1 draft: what stands behind the first place of the longest."""
    for length in (2, 1):
        for start in range(len(tokens) - length):
            if tokens[start : start + length] == tokens[-length:]:
                return tokens[start + length :][:NUM_DRAFTS]
    return []


def exact_law_of_look_up(target: Callable, rule: AcceptanceRule, num_tokens: int) -> Tensor:
    """Of the first tokens, a dimension each, if `look_up` drafts."""
    target = cache(target)
    law = torch.zeros([VOCAB] * num_tokens, dtype=torch.float64)

    def go_on(text: tuple[int, ...], chance: float, drafts: list[int]) -> None:
        if len(text) == num_tokens:
            law[text] += chance
            return
        q = target(text)
        if not drafts:
            for token, q_x in enumerate(q):
                go_on((*text, token), chance * q_x, look_up([*PROMPT, *text, token]))
            return
        one_hot = [float(token == drafts[0]) for token in range(VOCAB)]
        kept = reference.accept(rule, q, one_hot, drafts[0])
        go_on((*text, drafts[0]), chance * kept, drafts[1:])
        for token, g_x in enumerate(reference.residual(rule, q, one_hot, drafts[0]) if kept < 1 else []):
            go_on((*text, token), chance * (1 - kept) * g_x, look_up([*PROMPT, *text, token]))

    go_on((), 1.0, [])
    return law


def frequencies(found: list[tuple[int, ...]], num_tokens: int) -> Tensor:
    counts = torch.zeros([VOCAB] * num_tokens)
    for text in found:
        counts[text[:num_tokens]] += 1
    return counts


def chance(counts: Tensor, law: Tensor) -> float:
    """By chi-square, of counts this far from the law; cells of few counts are pooled."""
    observed, expected = counts.flatten().double(), law.flatten() * counts.sum()
    if (observed[expected == 0] > 0).any():
        return 0.0
    is_rare = expected < 5
    observed = torch.cat([observed[~is_rare], observed[is_rare].sum()[None]])
    expected = torch.cat([expected[~is_rare], expected[is_rare].sum()[None]])
    observed, expected = observed[expected > 0], expected[expected > 0]
    if len(expected) == 1:
        return 1.0
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2).double(), statistic / 2))
