"""Cactus speculative sampling inside transformers' `generate()`.

Tensors are named by these dimensions everywhere: R returned rows, B rows still being decoded (or a batch), m drafted
tokens a round, T tokens of a block, P prompt columns, N new tokens, V vocabulary. `q` is the target's law and `p` the
draft's.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from .acceptance import AcceptanceRule, Cactus, Mixture, SpeculativeSampling
    from .bounded_rules import Lenience, Mentored
    from .calibration.measuring import calibrate
    from .calibration.result import Calibration
    from .counters import SpeculationStats, TokenKind, track
    from .divergences import gamma
    from .generation import disable, enable
    from .heuristic_rules import TopK, TypicalAcceptance
    from .law import emitted_law
    from .outputs import SpeculativeOutput
    from .packed_linears import pack_linears, unpack_linears
    from .showing import show
    from .trimming import trim_draft
    from .verification import Verification, verify

__version__ = "0.1.0"

# Where each public name lives. They are imported when first asked for, as torch and transformers take seconds, which
# `cactus-hf --help` should not.
_HOMES = {
    "acceptance": ("AcceptanceRule", "Cactus", "Mixture", "SpeculativeSampling"),
    "bounded_rules": ("Lenience", "Mentored"),
    "calibration.measuring": ("calibrate",),
    "calibration.result": ("Calibration",),
    "counters": ("SpeculationStats", "TokenKind", "track"),
    "divergences": ("gamma",),
    "generation": ("disable", "enable"),
    "heuristic_rules": ("TopK", "TypicalAcceptance"),
    "law": ("emitted_law",),
    "outputs": ("SpeculativeOutput",),
    "packed_linears": ("pack_linears", "unpack_linears"),
    "showing": ("show",),
    "trimming": ("trim_draft",),
    "verification": ("Verification", "verify"),
}

__all__ = [
    "AcceptanceRule",
    "Cactus",
    "Calibration",
    "Lenience",
    "Mentored",
    "Mixture",
    "SpeculationStats",
    "SpeculativeOutput",
    "SpeculativeSampling",
    "TokenKind",
    "TopK",
    "TypicalAcceptance",
    "Verification",
    "calibrate",
    "disable",
    "emitted_law",
    "enable",
    "gamma",
    "pack_linears",
    "show",
    "track",
    "trim_draft",
    "unpack_linears",
    "verify",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            value = getattr(importlib.import_module(f".{home}", __name__), name)
            globals()[name] = value  # so that this function is not asked again
            return value
    if importlib.util.find_spec(f"{__name__}.{name}") is not None:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
