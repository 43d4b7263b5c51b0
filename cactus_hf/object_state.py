"""What a Python object holds: whether a call has changed it, and copies of it that can be called in its stead."""

from __future__ import annotations

import copy
import functools
import random
import re
import types
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase


VALUES = (str, bytes, int, float, complex, type(None), type(Ellipsis), range, slice, np.generic)
CONSTANTS = (type, types.FunctionType, types.BuiltinFunctionType, re.Pattern, Enum, torch.dtype, torch.device)
SHARED = (types.ModuleType, PreTrainedModel, PreTrainedTokenizerBase)
CONTAINERS = (list, tuple, set, frozenset, deque)
PLAIN = frozenset((str, bytes, int, float, complex, bool, type(None)))
MOST_PARTS = 10_000  # what lies deeper in a larger object is taken for a constant table


def _is_shared(item: Any) -> bool:
    """Large things that a call does not change, or that cannot be copied."""
    # All of xgrammar's objects are constant but those that can `fork`
    is_grammar = type(item).__module__.partition(".")[0] == "xgrammar" and hasattr(item, "_handle")
    return isinstance(item, SHARED) or is_grammar and not _can_fork(item)


def _can_fork(item: Any) -> bool:
    """Grammar matchers are copied by a method of this name."""
    return callable(getattr(type(item), "fork", None))


def _is_opaque(item: Any) -> bool:
    """Whether there may be more to it than Python can see, as with objects of C, iterators and generators."""
    known = (*VALUES, *CONSTANTS, *SHARED, *CONTAINERS, dict, Tensor, np.ndarray, types.MethodType, functools.partial)
    is_open = isinstance(item, known) or hasattr(item, "__dict__") or any(_slotted(item))
    return not is_open or isinstance(item, random.Random)


def _slotted(item: Any) -> Iterator[Any]:
    """Values of the attributes that have slots in place of a dictionary."""
    for cls in type(item).__mro__:
        for member in vars(cls).values() if "__slots__" in vars(cls) else ():
            if isinstance(member, types.MemberDescriptorType):
                with suppress(AttributeError):  # not set yet
                    yield member.__get__(item)


def _is_plain(item: Any) -> bool:
    """Whether it is a container of plain values, such as a vocabulary: those are compared and copied as a whole."""
    if type(item) is dict:
        return set(map(type, item)) | set(map(type, item.values())) <= PLAIN
    return type(item) in CONTAINERS and set(map(type, item)) <= PLAIN


def _parts(item: Any) -> list[Any]:
    if isinstance(item, (*VALUES, *CONSTANTS)) or _is_shared(item):
        return []
    if isinstance(item, types.MethodType):
        return [item.__self__]
    if isinstance(item, functools.partial):
        return [item.func, item.args, item.keywords]
    parts: list[Any] = []
    if isinstance(item, dict):
        parts += [*item.keys(), *item.values()]
    elif isinstance(item, CONTAINERS):
        parts += item
    parts += getattr(item, "__dict__", {}).values()
    return parts + [*_slotted(item)]


def reachable(item: Any) -> list[tuple[Any, bool]]:
    """The object and what it holds, the nearest first, each with whether it is plain."""
    found: list[tuple[Any, bool]] = []
    pending, seen = deque([item]), set()
    while pending and len(found) < MOST_PARTS:
        part = pending.popleft()
        is_plain = _is_plain(part)
        found.append((part, is_plain))
        if not is_plain and id(part) not in seen:
            seen.add(id(part))
            pending += _parts(part)
    return found


class Record:
    """What an object held at one moment."""

    def __init__(self, item: Any):
        self.entries = [(part, copy.copy(part) if is_plain else _version(part)) for part, is_plain in reachable(item)]

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Record)
            and len(self.entries) == len(other.entries)
            and all(_is_same(*pair) for pair in zip(self.entries, other.entries, strict=True))
        )

    def holds(self, count: int) -> bool:
        """Whether something in it has that many items."""
        sized = (*CONTAINERS, dict)
        return any(
            len(part) == count if isinstance(part, sized) else part.dim() > 0 and len(part) == count
            for part, _ in self.entries
            if isinstance(part, (*sized, Tensor))
        )


def _version(part: Any) -> Any:
    if isinstance(part, np.ndarray):
        return part.tobytes()
    if isinstance(part, Tensor):
        return object() if part.is_inference() else part._version
    return object() if _is_opaque(part) else None  # equal to no other: nobody can tell


def _is_same(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    (part, version), (other_part, other_version) = one, other
    if version != other_version:
        return False
    return part is other_part or type(part) is type(other_part) and isinstance(part, VALUES) and part == other_part


def copied(item: Any) -> Any:
    """A copy that can be called without changing the original; models, tokenizers and compiled grammars are shared.

    Raises `ValueError` if it cannot be copied.
    """
    memo: dict[int, Any] = {}
    for part, is_plain in reachable(item):
        if is_plain:
            memo[id(part)] = copy.copy(part)
        elif _is_shared(part):
            memo[id(part)] = part
        elif _can_fork(part):
            memo[id(part)] = part.fork()
    try:
        return copy.deepcopy(item, memo)
    except Exception as error:
        raise ValueError(
            f"{name_of(item)} cannot be copied ({error}), so it cannot be shown drafts that may be rejected. Give its "
            "class, or that of the part that resists, a `__deepcopy__`; it may return `self` if no call changes it."
        ) from error


def name_of(item: Any) -> str:
    owner = getattr(item, "__self__", item)  # of a bound method
    return type(owner).__name__
