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


def is_integer(value: Any) -> bool:
    """Whether it is an integer, of Python or numpy."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def check_parameter(
    name: str, value: Any, is_valid: Callable[[Tensor], Tensor], need: str, is_integer: bool = False
) -> float | Tensor:
    """
    Checks a number, or one number a row, and returns it as a `float` (or `int`), or as a tensor `[B]`.

    `is_valid` must be False for NaN, as every comparison is.
    """
    kind, dtype = ("an integer", torch.int64) if is_integer else ("a number", torch.float64)
    problem = ValueError(f"`{name}` must be {kind} {need}, or a list or 1-D tensor with one a row; got {value!r}.")
    if isinstance(value, Tensor):
        is_integral = not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
        if value.dim() > 1 or not (is_integral or (value.is_floating_point() and not is_integer)):
            raise problem
        # A copy: the rule is frozen, whatever becomes of the caller's tensor.
        checked = value.detach().to(dtype if is_integral else value.dtype, copy=True)
    else:
        entries = value if isinstance(value, (list, tuple)) else [value]
        number = numbers.Integral if is_integer else numbers.Real
        if any(isinstance(entry, bool) or not isinstance(entry, number) for entry in entries):
            raise problem
        try:
            checked = torch.tensor(value, dtype=dtype)
        except (OverflowError, RuntimeError, ValueError):  # an integer that no number of this type can be
            raise problem from None
    if not bool(is_valid(checked).all()):
        raise problem
    return checked if checked.dim() else checked.item()


def check_delta(delta: Any, name: str = "delta") -> float | Tensor:
    """Checks a budget in nats."""
    return check_parameter(name, delta, lambda x: x >= 0, "of nats, 0 (lossless) or more, `inf` allowed")


def per_row(parameter: Parameter, like: Tensor) -> Any:
    """A parameter `[B]` shaped to broadcast against `like` `[B, ...]`, in its dtype; one number stays as it is."""
    if not isinstance(parameter, Tensor):
        return parameter
    return parameter.to(like.dtype).reshape(-1, *[1] * (like.dim() - 1))


def check_num_rows(rule: AcceptanceRule, batch_size: int) -> None:
    """Raises `ValueError` unless the rule's parameters are single numbers or have one value for each of the rows."""
    for name, value in _tensor_fields(rule).items():
        if len(value) != batch_size:
            raise ValueError(
                f"`{name}` of {type(rule).__name__} has values for {len(value)} rows, but there are {batch_size}: "
                "give one number for all rows, or one value a row."
            )


def select_rows(rule: Rule, index: Tensor) -> Rule:
    """The rule for the rows `index` (int64 `[R]`, or a bool mask `[B]`) of the batch, in that order."""
    return _map_tensor_fields(rule, lambda value: value[index.to(value.device)])


def repeat_rows(rule: Rule, num_rows: int, repeats: int) -> Rule:
    """The rule for a batch in which each of `num_rows` stands `repeats` times in succession (`num_return_sequences`).

    Parameters that have not one value for each of these rows are left as they are.
    """
    return _map_tensor_fields(
        rule, lambda value: value.repeat_interleave(repeats) if len(value) == num_rows else value
    )


def move_rule(rule: Rule, device: torch.device) -> Rule:
    """The rule with its parameters on `device`."""
    return _map_tensor_fields(rule, lambda value: to_device(value, device))


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """The tensor on `device`. A GPU that it has to be copied to is not waited for."""
    if values.device.type == "cpu" and device.type == "cuda":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


def _tensor_fields(rule: AcceptanceRule) -> dict[str, Tensor]:
    values = {field.name: getattr(rule, field.name) for field in fields(rule)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def _map_tensor_fields(rule: Rule, function: Callable[[Tensor], Tensor]) -> Rule:
    # Not `dataclasses.replace`: it would check the values again, and so wait for the device.
    changed = copy.copy(rule)
    for name, value in _tensor_fields(rule).items():
        object.__setattr__(changed, name, function(value))
    return changed
