"""The ways to decode that `eval` compares: the target alone, or an acceptance rule and a draft length."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

from ..acceptance import AcceptanceRule, Cactus, Mixture, SpeculativeSampling
from ..bounded_rules import Lenience, Mentored
from ..heuristic_rules import TopK, TypicalAcceptance
from ..vllm_backend import TRANSFORMERS


PLAIN = "plain"


class RuleName(NamedTuple):
    """How a rule is named on the command line."""

    make: Callable[..., AcceptanceRule]
    parameter: str | None  # what stands behind the colon; `None` if nothing may
    is_optional: bool = False


RULES = {
    "sps": RuleName(SpeculativeSampling, None),
    "cactus": RuleName(Cactus, "DELTA"),
    "kl": RuleName(lambda budget: Cactus(kl_budget=budget), "BUDGET"),
    "mixture": RuleName(Mixture, "WEIGHT"),
    "typical": RuleName(TypicalAcceptance, "EPSILON", is_optional=True),
    "top-k": RuleName(TopK, "K", is_optional=True),
    "lenience": RuleName(Lenience, "LENIENCY"),
    "mentored": RuleName(Mentored, "BUDGET"),
}


class Method(NamedTuple):
    """One of the ways to decode."""

    name: str  # as on the command line
    num_drafts: int | None = None  # m; `None` for the target alone
    backend: str = TRANSFORMERS

    @property
    def is_plain(self) -> bool:
        return self.name == PLAIN

    @property
    def title(self) -> str:
        """What tables call it."""
        return self.name if self.backend == TRANSFORMERS else f"{self.name} ({self.backend})"

    def options(self, draft: Any) -> dict[str, Any]:
        """Its options of `generate()`; whatever the draft's own config says about lengths is set aside."""
        if self.is_plain:
            return {}
        return {
            "assistant_model": draft,
            "acceptance_rule": parse_rule(self.name),
            "num_assistant_tokens": self.num_drafts,
            "num_assistant_tokens_schedule": "constant",
            "assistant_confidence_threshold": 0.0,
        }


def syntax() -> str:
    """The names that `parse_rule` knows, for help and errors."""
    names = []
    for name, rule in RULES.items():
        parameter = f":{rule.parameter}" if rule.parameter else ""
        names.append(f"{name}[{parameter}]" if rule.is_optional else name + parameter)
    return ", ".join(names)


def parse_rule(text: str) -> AcceptanceRule:
    """
    The rule called `text`, such as `cactus:0.5`.

    Raises:
        ValueError: if there is none.
    """
    name, _, value = text.partition(":")
    if name not in RULES:
        raise ValueError(f"There is no method called {text!r}. Known: {PLAIN}, {syntax()}.")
    make, parameter, is_optional = RULES[name]
    if bool(value) and parameter is None:
        raise ValueError(f"{text!r}: {name} has no parameter. Write {name!r}.")
    if not value:
        if parameter and not is_optional:
            raise ValueError(f"{text!r}: {name} needs a number. Write {name}:{parameter}.")
        return make()
    try:
        number = float(value)
    except ValueError:
        raise ValueError(f"{text!r}: {value!r} is not a number. Write {name}:{parameter}.") from None
    return make(int(number) if parameter == "K" and number.is_integer() else number)


def method_name(text: str) -> str:
    """An argparse type: a known name, in one spelling (`cactus:.50` becomes `cactus:0.5`)."""
    if text == PLAIN:
        return text
    try:
        parse_rule(text)
    except (ValueError, OverflowError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    name, _, value = text.partition(":")
    return f"{name}:{float(value):g}" if value else name
