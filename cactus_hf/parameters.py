"""Parameters of acceptance rules: one number for the whole batch, or a tensor `[B]` with one value a row."""

from __future__ import annotations

import copy
import numbers
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .acceptance import AcceptanceRule

Rule = TypeVar("Rule", bound="AcceptanceRule")
Parameter = float | Sequence[float] | Tensor


def check_parameter(
    name: str, value: Any, is_valid: Callable[[Tensor], Tensor], need: str, is_integer: bool = False
) -> float | Tensor:
    """
    Checks a number, or one number a row, and returns it as a `float` (`int`), or as a tensor `[B]` for a list or a tensor.

    `is_valid` must be False for NaN, as every comparison is.
    """
    kind, number, dtype = (
        ("an integer", numbers.Integral, torch.int64) if is_integer else ("a number", numbers.Real, torch.float64)
    )
    problem = ValueError(f"`{name}` must be {kind} {need}, or one of these a row (list or 1-D tensor); got {value!r}.")
    if isinstance(value, Tensor):
        is_typed = not (value.dtype == torch.bool or value.is_complex() or (is_integer and value.is_floating_point()))
        if value.dim() > 1 or not is_typed:
            raise problem
        # A copy: the rule is frozen, whatever the caller does to his tensor afterwards.
        checked = value.detach().clone() if value.is_floating_point() else value.detach().to(dtype, copy=True)
    else:
        entries = list(value) if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(entry, bool) or not isinstance(entry, number) for entry in entries):
            raise problem
        checked = torch.tensor(entries if isinstance(value, (list, tuple)) else value, dtype=dtype)
    if not bool(is_valid(checked).all()):
        raise problem
    return checked if checked.dim() else checked.item()


def check_delta(delta: Any) -> float | Tensor:
    """Checks a budget in nats."""
    return check_parameter("delta", delta, lambda x: x >= 0, "of nats, 0 (lossless) or more, `inf` allowed")


def per_row(parameter: Parameter, like: Tensor) -> Any:
    """A parameter `[B]` shaped to broadcast against `like` `[B, ...]`, and in its dtype; one number stays as it is."""
    if not isinstance(parameter, Tensor):
        return parameter
    return parameter.to(like.dtype).reshape(-1, *[1] * (like.dim() - 1))


def check_num_rows(rule: AcceptanceRule, batch_size: int) -> None:
    """Raises `ValueError` unless the rule's per-row parameters, if any, have one value for each of `batch_size` rows."""
    for name, value in _tensor_fields(rule).items():
        if len(value) != batch_size:
            raise ValueError(
                f"`{name}` of {type(rule).__name__} has values for {len(value)} rows, but there are {batch_size} rows: give one "
                "number for all of them, or one value a row."
            )


def select_rows(rule: Rule, index: Tensor) -> Rule:
    """The rule for the rows `index` (int64 `[R]`, or a bool mask `[B]`) of the batch, in that order."""
    return _map_tensor_fields(rule, lambda value: value[index.to(value.device)])


def repeat_rows(rule: Rule, repeats: int) -> Rule:
    """The rule for a batch in which every row stands `repeats` times in succession (`num_return_sequences`)."""
    return _map_tensor_fields(rule, lambda value: value.repeat_interleave(repeats))


def move_rule(rule: Rule, device: torch.device) -> Rule:
    """The rule with its per-row parameters on `device`."""
    return _map_tensor_fields(rule, lambda value: value.to(device))


def _tensor_fields(rule: AcceptanceRule) -> dict[str, Tensor]:
    values = {field.name: getattr(rule, field.name) for field in fields(rule)}  # type: ignore[arg-type]
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def _map_tensor_fields(rule: Rule, function: Callable[[Tensor], Tensor]) -> Rule:
    # Not `dataclasses.replace`: it would check the values again, and so wait for the device.
    changed = copy.copy(rule)
    for name, value in _tensor_fields(rule).items():
        object.__setattr__(changed, name, function(value))
    return changed
