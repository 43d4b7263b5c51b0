"""vLLM as the engine of `cactus-hf eval` and `cactus-hf bench`: prompts as ids in, tokens and rounds out.

vLLM loads the pair from its folders or from the Hub, and this package's plugin (docs/serving.md) brings the rule.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import importlib.util
import json
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple


if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

TRANSFORMERS, VLLM = "transformers", "vllm"
BACKENDS = (TRANSFORMERS, VLLM)
DELTAS = "cactus:0"  # the rule of an engine whose requests bring a delta each
# Arguments of `vllm.LLM` that the commands' own options set
OWN = (
    "model", "tokenizer", "dtype", "seed", "speculative_config", "additional_config", "spec_method", "spec_model",
    "spec_tokens", "per_request_spec_decode_metrics",
)  # fmt: skip
# Options that say how transformers runs the models, and what there is for vLLM instead
ELSEWHERE = {
    "device": "vLLM takes the device that it was built for: choose a GPU by CUDA_VISIBLE_DEVICES",
    "assistant_dtype": "vLLM gives the draft the target's precision",
    "pack": "packed layers are transformers' only",
    "assistant_pack": "packed layers are transformers' only",
    "threads": "set OMP_NUM_THREADS, which holds for both backends",
    "preset": "vLLM loads models from folders or the Hub",
    "synthetic_acceptance": "it is a rule of the loop in transformers",
    "verify": "it runs no backend",
}


def add_backend(add: Callable[..., Any]) -> None:
    """Adds, by `add`, a group's `add_argument`, the options that choose what decodes."""
    add(
        "--backend",
        nargs="+",
        choices=BACKENDS,
        default=[TRANSFORMERS],
        metavar="NAME",
        help=f"{' or '.join(BACKENDS)}, or both for one table of the two (default: {TRANSFORMERS})",
    )
    add(
        "--vllm-options",
        type=_options,
        metavar="JSON",
        help="further arguments of vllm.LLM, such as '{\"tensor_parallel_size\": 2}'",
    )


def _options(text: str) -> dict[str, Any]:
    """An argparse type: a JSON object without what the commands set themselves."""
    try:
        options = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"needs a JSON object, got {text!r} ({error})") from None
    if not isinstance(options, dict):
        raise argparse.ArgumentTypeError(f"needs a JSON object, got {text!r}")
    if own := [name for name in OWN if name in options]:
        raise argparse.ArgumentTypeError(f"leave {', '.join(own)} out: options of the command set it")
    return options


def is_vllm_alone(args: argparse.Namespace) -> bool:
    return set(args.backend) == {VLLM}


def check_backend(args: argparse.Namespace) -> None:
    """
    Raises:
        ValueError: for options that vLLM cannot follow, and for vLLM's options without it.
        ImportError: if vLLM is asked for and missing.
    """
    if VLLM not in args.backend:
        if args.vllm_options is not None:
            raise ValueError(f"--vllm-options is for --backend {VLLM}: add that, or leave it out.")
        return
    for name, instead in ELSEWHERE.items():
        if getattr(args, name, None) not in (None, False):
            raise ValueError(f"--{name.replace('_', '-')} is not for --backend {VLLM}: leave it out; {instead}.")
    if not (args.pair or args.model):
        raise ValueError(
            f"--backend {VLLM} needs a pair of folders or Hub ids, and the embedded draft is neither: give --model "
            "and --assistant, or --pair."
        )
    if importlib.util.find_spec("vllm") is None:
        raise ImportError(f"--backend {VLLM} needs vLLM: pip install 'cactus_hf[vllm]' (see docs/serving.md).")
    if not has_plugin():
        raise ImportError(
            f"--backend {VLLM} needs the plugin that an installed cactus_hf has: install the package (in a clone: pip "
            "install -e .), and name cactus_hf in VLLM_PLUGINS if that is set."
        )


def has_plugin() -> bool:
    """Whether vLLM loads the plugin: without it, what asks for a rule would ask nobody."""
    allowed = os.environ.get("VLLM_PLUGINS")
    is_there = bool(importlib.metadata.entry_points(group="vllm.general_plugins", name="cactus_hf"))
    return is_there and (allowed is None or "cactus_hf" in allowed.split(","))


class Source(NamedTuple):
    """A pair whose weights vLLM loads by itself."""

    name: str
    target: str  # folder or Hub id
    draft: str
    dtype: str
    tokenizer: PreTrainedTokenizerBase
    config: PreTrainedConfig

    @property
    def title(self) -> str:
        """One line: which models, in what."""
        return f"{self.name}, {self.dtype} in vLLM {version()}"


def find_source(args: argparse.Namespace) -> Source:
    """The pair that the options name, in the precision that transformers would take."""
    from transformers import AutoConfig, AutoTokenizer

    from . import pairs

    target, draft = pairs.named(args.pair) if args.pair else (args.model, args.assistant)
    tokenizer = pairs.from_pretrained(AutoTokenizer, target)
    pairs.check_tokenizers(tokenizer, pairs.from_pretrained(AutoTokenizer, draft), target, draft)
    config = pairs.from_pretrained(AutoConfig, target)
    stored = str(config.dtype or "float32").removeprefix("torch.")
    dtype = args.dtype or ("float32" if pairs.find_device().type == "cpu" else stored)
    return Source(f"{target} + {draft}", target, draft, dtype, tokenizer, config)


class Engine(NamedTuple):
    """What an engine is started for; methods with equal ones share it."""

    num_drafts: int | None = None  # m; `None` for the target alone
    rule: str | None = None  # as `--methods` of eval spells it; `None` for vLLM's own sampler


class Completion(NamedTuple):
    """What became of a prompt."""

    ids: list[int]
    rounds: list[tuple[int, int]]  # tokens drafted and kept in each


class Decoded(NamedTuple):
    """What became of prompts given together."""

    completions: list[Completion]
    seconds: float
    ball_kl: float  # mean in nats a checked draft, as the plugin counts; 0 without it


def until_end(rounds: Sequence[tuple[int, int]], num_tokens: int) -> list[tuple[int, int]]:
    """
    The rounds (drafted, kept) of a text of `num_tokens` tokens, without what they hold behind its end.

    vLLM counts rounds whole and cuts the text afterwards; `SpeculationStats` counts nothing behind the end.
    """
    left, found = num_tokens - 1, []  # the first token belongs to no round
    for num_drafted, num_kept in rounds:
        if left <= 0:
            break
        is_last = num_kept + 1 >= left
        found.append((min(num_drafted, left), min(num_kept, left)) if is_last else (num_drafted, num_kept))
        left -= num_kept + 1
    return found


class Vllm:
    """
    Decodes with one engine at a time: another is started, and the one before ended, where a method asks for it.

    Args:
        source (`Source`): The pair.
        options (`dict`): Further arguments of `vllm.LLM`.
        seed (`int`): Of the engine, for requests without one of their own.
    """

    def __init__(self, source: Source, options: dict[str, Any] | None, seed: int) -> None:
        self.source, self.options, self.seed = source, options or {}, seed
        self.kind: Engine | None = None
        self._llm: Any = None
        # Read when vLLM is first imported. A fork of a process in which torch has run threads can hang.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

    def start(self, kind: Engine) -> None:
        """Has an engine of that kind running."""
        if kind == self.kind:
            return
        self.close()
        import torch
        from vllm import LLM

        # An engine has its memory from the device: give back what transformers' models have had
        gc.collect()
        torch.cuda.empty_cache()
        # Prompts that come again would be read for free, which transformers does not do
        options = {"enable_prefix_caching": False, **self.options}
        options |= {"model": self.source.target, "dtype": self.source.dtype, "seed": self.seed}
        if kind.num_drafts is not None:
            options["speculative_config"] = {
                "method": "draft_model",
                "model": self.source.draft,
                "num_speculative_tokens": kind.num_drafts,
                "draft_sample_method": "probabilistic",
            }
            options["per_request_spec_decode_metrics"] = "detailed"
        if kind.rule is not None:
            options["additional_config"] = {"cactus_hf": kind.rule}
        self._llm, self.kind = LLM(**options), kind

    def decode(self, prompts: Sequence[list[int]], sampling: Sequence[dict[str, Any]]) -> Decoded:
        """Completes prompts given together, by arguments of `vllm.SamplingParams` for each."""
        from vllm import SamplingParams

        requests = [{"prompt_token_ids": ids} for ids in prompts]
        params = [SamplingParams(**each) for each in sampling]
        before = self._divergence()
        start = time.perf_counter()
        outputs = self._llm.generate(requests, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        verified, kl_sum = (now - then for now, then in zip(self._divergence(), before, strict=True))
        return Decoded([_completion(each.outputs[0]) for each in outputs], seconds, kl_sum / max(verified, 1))

    def _divergence(self) -> tuple[int, float]:
        """Drafts checked so far, and their summed ball KL."""
        if self.kind is None or self.kind.rule is None:
            return 0, 0.0
        # Of several workers, those of the last pipeline stage verify, and all of them the same rounds
        counts = max(self._llm.collective_rpc("cactus_statistics"), key=lambda each: each["verified"])
        return counts["verified"], counts["verified"] * counts["ball_kl"]

    def close(self) -> None:
        """Ends the engine and frees its memory."""
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
            self._llm, self.kind = None, None


def _completion(output: Any) -> Completion:
    metrics = output.spec_decode_metrics
    rounds = zip(metrics.per_step_drafted, metrics.per_step_accepted, strict=True) if metrics is not None else ()
    return Completion(list(output.token_ids), list(rounds))


def version() -> str:
    import vllm

    return vllm.__version__
