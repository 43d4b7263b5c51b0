"""The vLLM plugin: what it is asked for, what it refuses, what it counts.

vLLM calls `register` in each of its processes. Three of its methods are then followed or preceded by a function here:
the engine's configuration is checked once it is made, each request before it is taken, and a worker of an engine that
asked for a rule gets it once its model runner is there (`vllm_v1.py` and `vllm_v2.py`). Without a rule asked for, all
three hand on what they got.

The rule's name is in the environment variable `CACTUS_HF_VLLM` or in `additional_config`. It travels to the workers
in the latter, whatever launches them.
"""

from __future__ import annotations

import difflib
import logging
import numbers
import os
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..acceptance import AcceptanceRule, Cactus, SpeculativeSampling
from ..evaluation.methods import parse_rule
from ..parameters import to_device


ENVIRONMENT = "CACTUS_HF_VLLM"
KEY = "cactus_hf"  # in vLLM's `additional_config`
VERSIONS = ((0, 32), (0, 33))
REQUEST_KEYS = ("cactus_delta", "cactus_kl")  # what a request may ask for instead of the engine's rule

# vLLM sets up the loggers below its own name only
logger = logging.getLogger(f"vllm.{__name__}")


def register() -> None:
    """The entry point of `vllm.general_plugins`. Once in a process is enough; more often changes nothing."""
    import vllm
    from vllm.engine.arg_utils import EngineArgs

    _follow(EngineArgs, "create_engine_config", _checking_engines)
    if vllm.__version_tuple__[:2] not in VERSIONS:
        return  # an engine that asks for a rule is refused, by the line above; others are none of our business
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    _follow(InputProcessor, "process_inputs", _checking_requests)
    _follow(WorkerWrapperBase, "init_device", _installing)


def _follow(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    original = getattr(owner, name)
    if original.__module__ != __name__:
        setattr(owner, name, wrap(original))


def _checking_engines(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        vllm_config = original(self, *args, **kwargs)
        check_engine(vllm_config)
        return vllm_config

    return create_engine_config


def _checking_requests(original: Callable[..., Any]) -> Callable[..., Any]:
    def process_inputs(self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        check_request(self.vllm_config, params)
        return original(self, request_id, prompt, params, *args, **kwargs)

    return process_inputs


def _installing(original: Callable[..., Any]) -> Callable[..., Any]:
    def init_device(self: Any) -> None:
        original(self)
        rule = asked_rule(self.vllm_config)
        if rule is not None:
            name = self.vllm_config.additional_config[KEY]
            statistics = Statistics(name, self.worker.device)
            _runner(self.vllm_config).install(self.worker.model_runner, rule, statistics)
            self.worker.cactus_statistics = statistics.read  # for `llm.collective_rpc("cactus_statistics")`
            logger.info("cactus: %s", name)

    return init_device


def _runner(vllm_config: Any) -> ModuleType:
    """What knows the engine's model runner, by its function `install`."""
    from . import vllm_v1, vllm_v2

    return vllm_v2 if vllm_config.use_v2_model_runner else vllm_v1


def asked_rule(vllm_config: Any) -> AcceptanceRule | None:
    """The engine's rule, for the requests that name none; `None` if the plugin was not asked for."""
    config = vllm_config.additional_config
    return parse_rule(config[KEY]) if isinstance(config, dict) and KEY in config else None


def check_engine(vllm_config: Any) -> None:
    """
    Writes the rule that is asked for into `additional_config`; nothing if there is none.

    Raises:
        ValueError: if the name is no rule's, or this version or configuration of vLLM cannot run it.
    """
    config = vllm_config.additional_config
    name = _asked_name(config)
    if name is None:
        return
    try:
        parse_rule(name)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{ENVIRONMENT} or additional_config[{KEY!r}]: {error}") from None
    import vllm

    need = f"cactus_hf was asked to run {name!r}"
    if vllm.__version_tuple__[:2] not in VERSIONS:
        known = " and ".join(".".join(map(str, version)) for version in VERSIONS)
        raise ValueError(f"{need}, which it knows how to do in vLLM {known}; this is {vllm.__version__}.")
    speculative = vllm_config.speculative_config
    if speculative is None:
        raise ValueError(f"{need}, but nothing drafts: pass `speculative_config` (--speculative-config) as well.")
    if speculative.rejection_sample_method != "standard":
        raise ValueError(
            f"{need}, but `rejection_sample_method` is {speculative.rejection_sample_method!r}, another way to accept "
            'drafts: leave it at "standard".'
        )
    if getattr(vllm_config, "watermark_config", None) is not None:
        raise ValueError(f"{need}, which is no watermarked law: leave out `watermark_config`.")
    vllm_config.additional_config = {**config, KEY: name}


def _asked_name(config: Any) -> str | None:
    named = os.environ.get(ENVIRONMENT) or None
    if not isinstance(config, dict):
        if named is not None:
            raise ValueError(f"{ENVIRONMENT} needs an `additional_config` that is a dictionary; got {config!r}.")
        return None
    configured = config.get(KEY)
    if KEY in config and not isinstance(configured, str):
        raise ValueError(f'additional_config[{KEY!r}] must name a rule, as in "cactus:0.5"; got {configured!r}.')
    if None not in (named, configured) and named != configured:
        raise ValueError(
            f"{ENVIRONMENT} is {named!r} and additional_config[{KEY!r}] is {configured!r}: give one of them."
        )
    return named if configured is None else configured


def check_request(vllm_config: Any, params: Any) -> None:
    """
    Checks what a request asks for, before anything of it is computed.

    Raises:
        vllm.exceptions.VLLMValidationError: which the server answers with status 400.
    """
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    if not isinstance(params, SamplingParams):
        return
    default = asked_rule(vllm_config)
    try:
        if default is None:
            if asked := _asked_of(params):
                raise ValueError(
                    f"{', '.join(asked)}: this engine runs no rule of cactus_hf. Start it with "
                    f"{ENVIRONMENT}=cactus:0, or another rule as its default."
                )
        else:
            _check_grammar(vllm_config.speculative_config, request_rule(params, default), params)
    except ValueError as error:
        raise VLLMValidationError(str(error), parameter="extra_args") from None


def _check_grammar(speculative: Any, rule: AcceptanceRule, params: Any) -> None:
    """Of drafts that a grammar forbids vLLM lets no rule know: it draws from the target in their place."""
    if params.structured_outputs is None or params.temperature == 0 or is_lossless(rule):
        return
    need = f"structured outputs are not exact with {rule!r}"
    if not isinstance(rule, Cactus):
        raise ValueError(f"{need}: ask for a `cactus_delta` instead.")
    if speculative.draft_sample_method == "probabilistic":
        raise ValueError(
            f"{need} where drafts are drawn: ask for `cactus_delta` 0, vLLM's own way, or start the engine with "
            '`draft_sample_method` "greedy".'
        )


def request_rule(params: Any, default: AcceptanceRule) -> AcceptanceRule:
    """
    The rule of a request: what `cactus_delta` or `cactus_kl` among its `extra_args` say, else the engine's.

    Raises:
        ValueError: for other names that begin so, and values that are no budget.
    """
    asked = _asked_of(params)
    for name in asked.keys() - set(REQUEST_KEYS):
        near = difflib.get_close_matches(name, REQUEST_KEYS, n=1, cutoff=0)[0]
        raise ValueError(f"There is no {name!r} among vLLM's extra_args (vllm_xargs). Did you mean {near!r}?")
    if len(asked) > 1:
        raise ValueError(f"{' and '.join(sorted(asked))} were both given: give one of them.")
    for name, value in asked.items():
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if not is_number or not value >= 0:
            raise ValueError(f"{name} must be a number of nats, 0 (the target's law) or more; got {value!r}.")
        return Cactus(float(value)) if name == "cactus_delta" else Cactus(kl_budget=float(value))
    return default


def own_rule(params: Any, default: AcceptanceRule) -> AcceptanceRule | None:
    """The rule of a request; `None` where vLLM's own code has its law.

    Greedy requests match the target's most likely token, whatever the rule.
    """
    rule = request_rule(params, default)
    return None if is_lossless(rule) or params.temperature == 0 else rule


def _asked_of(params: Any) -> dict[str, Any]:
    extra_args = params.extra_args or {}
    return {name: value for name, value in extra_args.items() if name.startswith("cactus_")}


def is_lossless(rule: AcceptanceRule) -> bool:
    """Whether vLLM's own code has the rule's law."""
    return isinstance(rule, SpeculativeSampling) or rule == Cactus(0.0)


class Statistics:
    """
    What became of drafted tokens in a worker, lossless and greedy rows included, also past the end of a text.

    Sums stay on the device and are asked for when they are to be logged: at vLLM's interval
    (`VLLM_LOG_STATS_INTERVAL`), in the first round after it.
    """

    def __init__(self, rule: str, device: torch.device):
        self.rule = rule
        self._num_rounds = self._num_drafted = 0
        self._sums = torch.zeros(3, dtype=torch.float64, device=device)  # accepted, verified, ball KL
        self._logged = [0.0] * 5
        self._due = time.monotonic() + self._interval()

    def add(self, num_drafts: list[int], num_accepted: Tensor, ball_kl: Tensor) -> None:
        """
        Counts a round of some rows; those without drafts have none.

        Args:
            num_drafts (`list[int]` of length B):
                Drafted tokens of each row.
            num_accepted (`Tensor` of shape `[B]`):
                Those kept.
            ball_kl (`Tensor` of shape `[N]`):
                KL(h || q) in nats of the law aimed at, for the drafts of all rows in succession.
        """
        lengths = torch.tensor(num_drafts)
        row = torch.arange(len(num_drafts)).repeat_interleave(lengths)
        position = torch.arange(len(row)) - (lengths.cumsum(0) - lengths)[row]
        lengths, row, position = (to_device(x, ball_kl.device) for x in (lengths, row, position))
        accepted = torch.minimum(num_accepted.to(lengths.dtype), lengths)
        verified = torch.minimum(accepted + 1, lengths)
        kl = ball_kl.where(position < verified[row], 0.0).sum()
        self._sums += torch.stack([accepted.sum(), verified.sum(), kl])
        self._num_rounds += sum(number > 0 for number in num_drafts)
        self._num_drafted += sum(num_drafts)
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + self._interval()
            self._log()

    def read(self) -> dict[str, Any]:
        """Of all rounds so far: the rule's name, counts, `accepted_length` and the mean `ball_kl` in nats."""
        return {"rule": self.rule, **_means(self._totals())}

    def _log(self) -> None:
        totals = self._totals()
        means = _means([now - before for now, before in zip(totals, self._logged, strict=True)])
        self._logged = totals
        logger.info(
            "cactus: %s, drafted %d, accepted %d, mean accepted length %.2f (without the extra token), "
            "mean ball KL %.4f nats",
            self.rule,
            *(means[name] for name in ("drafted", "accepted", "accepted_length", "ball_kl")),
        )

    def _totals(self) -> list[float]:
        return [self._num_rounds, self._num_drafted, *self._sums.tolist()]

    @staticmethod
    def _interval() -> float:
        from vllm import envs

        return envs.VLLM_LOG_STATS_INTERVAL


def _means(totals: list[float]) -> dict[str, float]:
    rounds, drafted, accepted, verified, ball_kl = totals
    counts = {"rounds": rounds, "drafted": drafted, "accepted": accepted, "verified": verified}
    means = {"accepted_length": accepted / max(rounds, 1), "ball_kl": ball_kl / max(verified, 1)}
    return {name: int(value) for name, value in counts.items()} | means
