"""`calibrate`: texts, laws, rounds and sums, prompt by prompt."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, cast

import torch
from torch import Tensor

from ..acceptance import AcceptanceRule, Cactus, Mixture
from ..arguments import Prompt, encode
from ..bounded_rules import Lenience, Mentored
from ..heuristic_rules import TopK, TypicalAcceptance
from ..json_lines import claimed
from ..kl_budget import has_budget
from ..law import has_closed_form
from ..parameters import check_delta, is_integer
from .files import Finished, Record
from .laws import Values, evaluate
from .result import Calibration
from .rounds import round_sums
from .sampling import Texts, check_pair, checked_options, enabled


DELTAS = (0.0, 0.001, 0.003, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0)  # nats
SLOPES = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 9.0)  # of the limit
RULES: tuple[AcceptanceRule, ...] = (
    *(Cactus(kl_budget=budget) for budget in (0.01, 0.03, 0.1, 0.3)),
    TypicalAcceptance(),
    TypicalAcceptance(recovery="sample"),
    *map(TopK, (1, 3, 5)),
    *map(Lenience, (0.7, 0.5, 0.3, 0.1)),
    *map(Mentored, (0.01, 0.03, 0.1, 0.3)),
    *map(Mixture, (0.9, 0.7, 0.5, 0.3, 0.1)),
)


def calibrate(
    model: Any,
    assistant_model: Any,
    prompts: Sequence[Prompt | Sequence[int]],
    *,
    tokenizer: Any = None,
    deltas: Sequence[float] = DELTAS,
    rules: Sequence[AcceptanceRule] = RULES,
    max_new_tokens: int = 128,
    num_assistant_tokens: int = 5,
    longest: int = 20,
    batch_size: int = 8,
    seed: int = 0,
    resume: str | os.PathLike | None = None,
    progress: bool = True,
    **options: Any,
) -> Calibration:
    """
    Finds out what each delta gives on prompts of one's own, without decoding with any: which delta has which mean
    divergence, acceptance and accepted length.

    Continuations are sampled from the target's own law, both models are run over them, and each rule's acceptance and
    emitted law is evaluated exactly at every position. Positions count as often as rounds of decoding would verify
    them. What stays uncertain is which prompts were taken, for which the standard errors stand, and that texts written
    at a large delta may lead elsewhere than the target's.

    Args:
        model, assistant_model (`PreTrainedModel`):
            Target and draft, of one tokenizer, decoder-only.
        prompts (list of `str`, of messages or of `list[int]`):
            Texts (a user's turn, where the tokenizer has a chat template), chats, or token ids.
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            Needed unless all prompts are ids.
        deltas (sequence of `float`, *optional*):
            Budgets in nats to evaluate, finite.
        rules (sequence of [`AcceptanceRule`], *optional*):
            Others to compare with.
        max_new_tokens (`int`, *optional*, defaults to 128):
            Of each continuation.
        num_assistant_tokens (`int`, *optional*, defaults to 5):
            The draft length that answers are for, if they are not asked for another.
        longest (`int`, *optional*, defaults to 20):
            The largest draft length that can be asked for.
        batch_size (`int`, *optional*, defaults to 8):
            Prompts sampled and read together.
        seed (`int`, *optional*, defaults to 0):
            Of the continuations and of the resampling.
        resume (`str` or path, *optional*):
            A file that keeps each finished batch. If it is there, the calibration goes on with it.
        progress (`bool`, *optional*, defaults to `True`):
            Whether to show a progress bar where there is a terminal. Needs tqdm.
        options:
            Of `generate()`, the same for every call: `temperature`, `top_k`, `top_p`, penalties, processors, ...

    Returns:
        [`Calibration`]

    Raises:
        ValueError: for options that contradict one another, and for a file of another calibration.
    """
    deltas, rules = _checked(deltas, rules)
    for name, value in (
        ("max_new_tokens", max_new_tokens),
        ("num_assistant_tokens", num_assistant_tokens),
        ("longest", longest),
        ("batch_size", batch_size),
    ):
        if not is_integer(value) or value < 1:
            raise ValueError(f"`{name}` must be an integer of at least 1, got {value!r}.")
    if num_assistant_tokens > longest:
        raise ValueError(f"`num_assistant_tokens` is {num_assistant_tokens}, and `longest` is only {longest}.")
    if not is_integer(seed):
        raise ValueError(f"`seed` must be an integer, got {seed!r}.")
    if max_new_tokens < 3:
        raise ValueError("`max_new_tokens` below 3 leaves no round with a draft: give more.")
    ids = _ids(prompts, tokenizer)
    options = checked_options(options, model) | {"max_new_tokens": int(max_new_tokens)}
    check_pair(model, assistant_model, ids, max_new_tokens)
    header = {
        "deltas": deltas,
        "settings": [
            *({"label": f"Cactus({delta:g})", "kind": "Cactus", "delta": delta} for delta in deltas),
            *({"label": _label(rule), "kind": _kind(rule), "delta": None} for rule in rules),
            *({"label": f"limit, slope {slope:g}", "kind": "limit", "delta": None} for slope in SLOPES),
        ],
        "longest": int(longest),
        "num_assistant_tokens": int(num_assistant_tokens),
        "batch_size": int(batch_size),
        "seed": int(seed),
        "num_prompts": len(ids),
        "prompts_sha256": hashlib.sha256(repr(ids).encode()).hexdigest(),
        "models": [_facts(each) for each in (model, assistant_model)],
        "options": {name: _written(value) for name, value in sorted(options.items())},
    }
    every = [*map(Cactus, deltas), *rules]
    with claimed(resume), enabled(model) as target, _bar(len(ids), progress) as bar:
        record = Record(header, resume)
        texts = Texts(target, assistant_model, options)
        for begin in range(0, len(ids), batch_size):
            # The whole batch again if one is missing, as what a row rounds to may depend on its neighbours
            numbers = range(begin, min(begin + batch_size, len(ids)))
            if not all(number in record.finished for number in numbers):
                batch = [ids[number] for number in numbers]
                seeds = [seed * 2**32 + number for number in numbers]
                found = {}
                for number, text in zip(numbers, texts.read(batch, seeds), strict=True):
                    values = evaluate(text.target_logits, text.draft_logits, text.tokens, every, SLOPES)
                    is_drafted = text.draft_logits.amax(-1) != -torch.inf
                    found[number] = finished(values, is_drafted, longest, max_new_tokens)
                record.add(found)
            bar.update(len(numbers))
    if not any(each.positions[:, 0].any() for each in record.finished.values()):
        raise ValueError(
            "No text has a drafted token behind its first one, so there is nothing to evaluate: give other prompts, "
            "or other options, such as `min_new_tokens`."
        )
    return Calibration.of(header, record.finished)


def finished(values: Values, is_drafted: Tensor, longest: int, max_new_tokens: int) -> Finished:
    """The sums of one text."""
    values, is_drafted = Values(*(each.cpu() for each in values)), is_drafted.cpu()
    count = is_drafted[1:].sum().double().expand(values.kl.shape[1])
    sums = (each[1:].sum(0) for each in (values.acceptance, values.kl, values.tv))
    return Finished(round_sums(values, is_drafted, longest, max_new_tokens), torch.stack([count, *sums], -1))


def _checked(deltas: Sequence[float], rules: Sequence[AcceptanceRule]) -> tuple[list[float], list[AcceptanceRule]]:
    deltas, rules = _listed("deltas", deltas), _listed("rules", rules)
    if not deltas:
        raise ValueError("`deltas` is empty: give at least one.")
    for delta in deltas:
        if isinstance(check_delta(delta), Tensor) or not math.isfinite(delta):
            raise ValueError(f"`deltas` must be finite numbers, got {delta!r}.")
    for rule in rules:
        if not isinstance(rule, AcceptanceRule):
            raise TypeError(f"`rules` must hold acceptance rules, got {type(rule).__name__}: {rule!r}.")
        if not has_closed_form(rule):
            raise ValueError(f"What {type(rule).__name__} emits is not known in closed form: leave it out of `rules`.")
        if isinstance(rule, Cactus) and rule.kl_total is not None:
            raise ValueError(f"{_label(rule)} depends on the positions before, so it has no figures: use `kl_budget`.")
        if any(isinstance(value, Tensor) for value in vars(rule).values()):
            raise ValueError(f"{rule!r} has one value a row: give rules with one number for all.")
    return sorted(set(map(float, deltas))), list(rules)


def _listed(name: str, values: Any) -> list[Any]:
    try:
        return list(values)
    except TypeError:
        raise TypeError(f"`{name}` must be a list, got {values!r}.") from None


def _label(rule: AcceptanceRule) -> str:
    """The rule with its numbers, and with words that are not the usual ones."""
    values = {each.name: getattr(rule, each.name) for each in fields(rule)}
    usual = {each.name: each.default for each in fields(rule)}
    told = {k: v for k, v in values.items() if v != usual[k] or isinstance(v, (int, float))}
    return f"{type(rule).__name__}({', '.join(f'{name}={value}' for name, value in told.items())})"


def _kind(rule: AcceptanceRule) -> str:
    """What stands for rules that differ in one number only."""
    if not isinstance(rule, Cactus):
        return type(rule).__name__
    ball = "" if (rule.divergence, rule.solver) == ("kl", "taylor") else f", {rule.divergence} {rule.solver}"
    return f"Cactus{', KL budget' * has_budget(rule)}{ball}"


def _ids(prompts: Any, tokenizer: Any) -> list[list[int]]:
    given = prompts.tolist() if hasattr(prompts, "tolist") else prompts  # of tensors and arrays
    if given is None or isinstance(given, (str, Mapping)) or not (given := list(given)):
        raise ValueError(
            f"`prompts` must be a list with at least one prompt: texts, chats, or lists of token ids; got {prompts!r}."
        )
    return [_ids_of(number, prompt, tokenizer) for number, prompt in enumerate(given)]


def _ids_of(number: int, prompt: Any, tokenizer: Any) -> list[int]:
    prompt = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not isinstance(prompt, (str, list, tuple)):
        raise TypeError(f"`prompts` must hold texts, chats (lists of messages) or lists of token ids; got {prompt!r}.")
    if not prompt and not isinstance(prompt, str):
        raise ValueError(f"Prompt {number} has no tokens: give some text, or some ids.")
    if not isinstance(prompt, str) and all(map(is_integer, prompt)):
        return list(map(int, prompt))
    if tokenizer is None:
        raise ValueError("`prompts` hold text: pass `tokenizer=` as well, or give lists of token ids.")
    if not hasattr(tokenizer, "apply_chat_template"):
        raise TypeError(f"`tokenizer` must be the target's tokenizer, got {tokenizer!r}.")
    return encode(tokenizer, cast(Prompt, prompt))


def _facts(model: Any) -> dict[str, Any]:
    return {
        "name": model.name_or_path,
        "parameters": model.num_parameters(),
        "dtype": str(model.dtype).removeprefix("torch."),
    }


def _written(value: Any) -> Any:
    """An option as JSON can hold it."""
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError):
        return type(value).__name__


def _bar(total: int, progress: bool) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, desc="Calibrating", unit="prompt", leave=False, disable=None if progress else True)
