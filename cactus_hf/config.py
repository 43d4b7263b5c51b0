"""What a user may ask of one call beyond transformers' own options, and the checks on it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .acceptance import AcceptanceRule, Cactus
from .draft_length import DraftLength
from .parameters import check_delta, check_num_rows, is_integer, move_rule, repeat_rows
from .round_costs import RoundCosts


# Keywords of `generate()` that this package adds
KEYWORDS = (
    "cactus_delta",
    "cactus_kl",
    "cactus_kl_total",
    "acceptance_rule",
    "speculation_kl",
    "generator",
    "speculation_costs",
)
# Those that may also stand in a generation config
CONFIG_KEYWORDS = ("cactus_delta", "cactus_kl", "cactus_kl_total", "speculation_costs")
# Parameters of `Cactus`, by the keyword that stands for each
CACTUS_KEYWORDS = {"cactus_delta": "delta", "cactus_kl": "kl_budget", "cactus_kl_total": "kl_total"}
# Options of transformers that settle the draft length, with our name for each
LENGTH_KEYWORDS = {
    "num_assistant_tokens": "num_tokens",
    "num_assistant_tokens_schedule": "schedule",
    "assistant_confidence_threshold": "confidence_threshold",
}


@dataclass(frozen=True)
class SpeculationOptions:
    """The options of one call.

    Args:
        rule (`AcceptanceRule`): how drafts are accepted.
        is_explicit (`bool`): whether the call itself asked for it, or only the model's generation config.
        speculation_kl (`bool`): whether to measure the divergence of the emitted law.
        generator (`torch.Generator` or list of `int`, *optional*): seeds of the rows.
        lengths (`dict`): the draft-length options that the call or the target's config gave.
        costs (`RoundCosts`, *optional*): of rounds, for the schedule `"auto"`.
        has_own_costs (`bool`): whether the call itself gave them.
    """

    rule: AcceptanceRule
    is_explicit: bool
    speculation_kl: bool
    generator: torch.Generator | Sequence[int] | None
    lengths: dict[str, Any]
    costs: RoundCosts | None = None
    has_own_costs: bool = False

    def draft_length(self, draft_defaults: dict[str, Any]) -> DraftLength:
        """The draft length, with the draft's own config for what neither call nor target's config says."""
        merged = draft_defaults | self.lengths
        return DraftLength(**{LENGTH_KEYWORDS[name]: value for name, value in merged.items()})

    def with_costs(self, length: DraftLength) -> DraftLength:
        """The same, with the costs of rounds that were given."""
        if self.has_own_costs and length.schedule != "auto":
            raise ValueError(
                '`speculation_costs` are for `num_assistant_tokens_schedule="auto"`, but the schedule is '
                f"{length.schedule!r}: pass the one, or leave the other out."
            )
        return replace(length, costs=self.costs)


def given(source: Any, names: Sequence[str]) -> dict[str, Any]:
    """The options of a config (or dictionary) that are set to something."""
    values = source if isinstance(source, dict) else {name: getattr(source, name, None) for name in names}
    return {name: values[name] for name in names if values.get(name) is not None}


def make_options(call: dict[str, Any], configs: Sequence[Any]) -> SpeculationOptions | None:
    """
    Args:
        call (`dict`): keyword arguments of `generate()`.
        configs (list of `GenerationConfig`): where else options may stand, the most important first.

    Returns:
        [`SpeculationOptions`], or `None` if nobody asked for anything: then transformers' own code runs.

    Raises:
        ValueError: for options that contradict one another or cannot be read.
    """
    own = given(call, KEYWORDS)
    for name in KEYWORDS:
        if name not in CONFIG_KEYWORDS and any(getattr(config, name, None) is not None for config in configs):
            raise ValueError(
                f"`{name}` stands in a generation config, which holds {_names(CONFIG_KEYWORDS)} only: pass it in the "
                "call."
            )
    _refuse_conflicts(call, configs)
    wants_kl = _checked_flag(own.get("speculation_kl", False))
    rule = own.get("acceptance_rule")
    is_explicit = rule is not None or any(name in own for name in CACTUS_KEYWORDS)
    if rule is None:
        # The ensemble weight chooses transformers' own rule, over what configs say
        rule = _cactus_of([own] if call.get("assistant_ensemble_weight") is not None else [own, *configs])
    if rule is None:
        extras = [name for name, value in own.items() if value is not False]
        if extras:
            raise ValueError(
                f"{_names(extras)} given without an acceptance rule: also pass `cactus_delta=` (0 is lossless), "
                "`cactus_kl=` or `acceptance_rule=`."
            )
        return None
    if not isinstance(rule, AcceptanceRule):
        raise TypeError(
            f"`acceptance_rule` must be a rule such as `cactus_hf.Cactus(1.0)`, got {type(rule).__name__}: {rule!r}."
        )
    lengths: dict[str, Any] = {}
    for source in reversed([call, *configs]):
        lengths |= given(source, list(LENGTH_KEYWORDS))
    if call.get("use_cache") is False:
        raise ValueError("Speculative decoding rolls back a cache: `use_cache=False` cannot go with it. Leave it out.")
    if is_explicit and call.get("cache_implementation") == "paged":  # transformers goes another way before it checks
        raise ValueError(
            '`cache_implementation="paged"` is continuous batching (`generate_batch`), which decodes without drafts: '
            "leave it out, or leave `cactus_delta`, `cactus_kl` and `acceptance_rule` out."
        )
    costs: dict[str, Any] = {}
    for source in reversed([own, *configs]):
        costs |= given(source, ["speculation_costs"])
    return SpeculationOptions(
        rule,
        is_explicit,
        wants_kl,
        _checked_generator(own.get("generator")),
        lengths,
        RoundCosts.from_dict(costs["speculation_costs"]) if costs else None,
        "speculation_costs" in own,
    )


def _checked_flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"`speculation_kl` must be True or False, got {value!r}.")
    return value


def _cactus_of(sources: Sequence[Any]) -> Cactus | None:
    """The rule that keywords ask for: one source may say the budget of a position, a later one that of a sequence."""
    parameters: dict[str, Any] = {}
    for source in sources:
        values = given(source, list(CACTUS_KEYWORDS))
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and not isinstance(source, dict):
                raise TypeError(
                    f"`generation_config.{name}` must be a number or a list of numbers, as it is saved as JSON: got a "
                    "tensor. Use `.tolist()`."
                )
        if not parameters or ("cactus_delta" not in parameters and "cactus_delta" not in values):
            parameters = values | parameters
    if not parameters:
        return None
    checked: dict[str, Any] = {CACTUS_KEYWORDS[name]: check_delta(value, name) for name, value in parameters.items()}
    return Cactus(**checked)


def _refuse_conflicts(call: dict[str, Any], configs: Sequence[Any]) -> None:
    choices = ("cactus_delta", "acceptance_rule", "assistant_ensemble_weight")
    for source in (call, *configs):
        rules, budgets = given(source, choices), given(source, ("cactus_kl", "cactus_kl_total"))
        if len(rules) + bool(budgets) > 1:
            raise ValueError(
                f"{_names(rules | budgets)} each choose the acceptance rule: give one of them. "
                "(`cactus_hf.Mixture(weight)` is the ensemble weight as an `acceptance_rule`, and `cactus_kl` and "
                "`cactus_kl_total` go together.)"
            )


def _names(options: Iterable[str]) -> str:
    return " and ".join(f"`{name}`" for name in options)


def _checked_generator(generator: Any) -> torch.Generator | Sequence[int] | None:
    if generator is None or isinstance(generator, torch.Generator):
        return generator
    if isinstance(generator, Sequence) and all(is_integer(seed) for seed in generator):
        return [int(seed) for seed in generator]
    raise TypeError(
        f"`generator` must be a `torch.Generator` or a list of integer seeds, one a returned row, got {generator!r}."
    )


def rule_for_rows(
    rule: AcceptanceRule, num_rows: int, num_return_sequences: int, device: torch.device
) -> AcceptanceRule:
    """The rule for the `num_rows` returned rows: its parameters may have one value an input row or a returned row."""
    rule = move_rule(rule, device)
    rule = repeat_rows(rule, num_rows // num_return_sequences, num_return_sequences)
    check_num_rows(rule, num_rows)
    return rule
