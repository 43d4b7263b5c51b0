"""Cactus speculative sampling inside transformers' `generate()`.

Tensors are named by these dimensions everywhere: R returned rows, B rows still being decoded (or a batch), m drafted
tokens a round, T tokens of a block, P prompt columns, N new tokens, V vocabulary. `q` is the target's law and `p` the
draft's.
"""

from .acceptance import AcceptanceRule, Cactus, Mixture, SpeculativeSampling, TopK, TypicalAcceptance, gamma
from .counters import SpeculationStats, TokenKind, track
from .generation import disable, enable
from .law import emitted_law
from .outputs import SpeculativeOutput
from .verify import Verification, verify


__version__ = "0.1.0"

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
