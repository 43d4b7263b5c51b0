"""Cactus speculative sampling inside transformers' `generate()`.

Tensors are named by these dimensions everywhere: R returned rows, B rows still being decoded (or a batch), m drafted
tokens a round, T tokens of a block, P prompt columns, N new tokens, V vocabulary. `q` is the target's law and `p` the
draft's.
"""

import importlib
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from .acceptance import AcceptanceRule, Cactus, Mixture, SpeculativeSampling, TopK, TypicalAcceptance, gamma
    from .counters import SpeculationStats, TokenKind, track
    from .generation import disable, enable
    from .law import emitted_law
    from .outputs import SpeculativeOutput
    from .verify import Verification, verify

__version__ = "0.1.0"

# Where each public name lives. They are imported when first asked for, as torch and transformers take seconds, which
# `cactus-hf --help` should not.
_HOMES = {
    "acceptance": (
        "AcceptanceRule",
        "Cactus",
        "Mixture",
        "SpeculativeSampling",
        "TopK",
        "TypicalAcceptance",
        "gamma",
    ),
    "counters": ("SpeculationStats", "TokenKind", "track"),
    "generation": ("disable", "enable"),
    "law": ("emitted_law",),
    "outputs": ("SpeculativeOutput",),
    "verify": ("Verification", "verify"),
}

__all__ = [
    "AcceptanceRule",
    "Cactus",
    "Mixture",
    "SpeculationStats",
    "SpeculativeOutput",
    "SpeculativeSampling",
    "TokenKind",
    "TopK",
    "TypicalAcceptance",
    "Verification",
    "disable",
    "emitted_law",
    "enable",
    "gamma",
    "track",
    "verify",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            # Importing the module `verify` puts it in place of the function of that name, which is why all are set
            module = importlib.import_module(f".{home}", __name__)
            globals().update({each: getattr(module, each) for each in names})
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
