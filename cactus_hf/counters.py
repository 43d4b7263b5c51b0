"""What happened during speculative decoding, row by row, and the means made of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor


MOST_PENDING = 64  # rounds that a recorder gathers before it counts them


class TokenKind(IntEnum):
    """How a generated token came about."""

    PAD = -1  # no token: the row had ended
    FIRST = 0  # drawn from the prompt's last row, before any draft
    ACCEPTED = 1  # drafted and kept
    BOOSTED = 2  # drafted and kept, though lossless sampling would have rejected it
    REPLACED = 3  # drawn in place of a rejected draft
    EXTRA = 4  # drawn by the target after the last draft, all of which were kept


@dataclass(frozen=True, eq=False)
class SpeculationStats:
    """
    Counts of one `generate()` call with R returned rows. Nothing behind the end of a row is counted.

    Args:
        drafted (`torch.Tensor` of shape [R], int64): drafted tokens.
        verified (`torch.Tensor` of shape [R], int64): drafted tokens up to and including each round's first rejection.
        accepted (`torch.Tensor` of shape [R], int64): drafted tokens that were kept.
        emitted (`torch.Tensor` of shape [R], int64): generated tokens, the first (which no round yields) included.
        rounds (`torch.Tensor` of shape [R], int64): rounds of drafting and verification.
        accepted_by_position (`torch.Tensor` of shape [R, m], int64): rounds that kept the draft at each position.
        kinds (`torch.Tensor` of shape [R, N], int8): the [`TokenKind`] of each generated token.
        ball_kl_sum (`torch.Tensor` of shape [R], float64): summed KL(h || q) in nats of the laws aimed at.
        emitted_kl_sum, emitted_tv_sum (`torch.Tensor` of shape [R], float64, *optional*): summed KL in nats and total
            variation between the law really emitted and the target's; only with `speculation_kl=True` or a budget of
            it (`cactus_kl`, `cactus_kl_total`).
    """

    drafted: Tensor
    verified: Tensor
    accepted: Tensor
    emitted: Tensor
    rounds: Tensor
    accepted_by_position: Tensor
    kinds: Tensor
    ball_kl_sum: Tensor
    emitted_kl_sum: Tensor | None = None
    emitted_tv_sum: Tensor | None = None

    @property
    def accepted_length(self) -> float:
        """AL: mean number of kept drafts a round, over all rounds of all rows."""
        return _ratio(self.accepted, self.rounds)

    @property
    def tokens_per_round(self) -> float:
        """Mean number of tokens a round yields; AL + 1 but for rounds in which a row ends."""
        return _ratio(self.emitted - (self.emitted > 0).long(), self.rounds)

    @property
    def acceptance_rate(self) -> float:
        """Share of the drafted tokens that were kept."""
        return _ratio(self.accepted, self.drafted)

    @property
    def position_acceptance(self) -> float:
        """Share of the verified drafts that were kept: the mean acceptance probability at a position."""
        return _ratio(self.accepted, self.verified)

    @property
    def ball_kl(self) -> float:
        """Mean KL(h || q) in nats a verified position, h being the law that raises the drafted token."""
        return _ratio(self.ball_kl_sum, self.verified)

    @property
    def emitted_kl(self) -> float | None:
        """Mean KL in nats a verified position between the law emitted and the target's; `None` if not asked for."""
        return None if self.emitted_kl_sum is None else _ratio(self.emitted_kl_sum, self.verified)

    @property
    def emitted_tv(self) -> float | None:
        """Mean total variation a verified position between the law emitted and the target's; `None`
        if not asked for.
        """
        return None if self.emitted_tv_sum is None else _ratio(self.emitted_tv_sum, self.verified)

    @property
    def emitted_kl_total(self) -> float | None:
        """Mean KL in nats a row between the law of its verified positions and the target's; `None` if not asked for.

        By the chain rule this is the divergence of whole texts from the target's, on average over texts.
        """
        return None if self.emitted_kl_sum is None else float(self.emitted_kl_sum.mean())

    @property
    def emitted_tv_total(self) -> float | None:
        """Mean sum a row of the verified positions' total variation, an upper bound of that of whole texts; `None` if
        not asked for.
        """
        return None if self.emitted_tv_sum is None else float(self.emitted_tv_sum.mean())


def _ratio(numerator: Tensor, denominator: Tensor) -> float:
    return float(numerator.sum()) / max(float(denominator.sum()), 1.0)


class Round(NamedTuple):
    """What the host learns of a round: tensors on the CPU for the B active rows, m drafts a row."""

    rows: Tensor  # [B], of the R returned ones
    begin: Tensor  # [B], tokens generated before
    tokens: Tensor  # [B, m + 1], the drafts and the token drawn behind the kept ones
    num_emitted: Tensor  # [B], leading `tokens` that were committed
    has_ended: Tensor  # [B], bool
    num_accepted: Tensor  # [B]
    num_drafted: Tensor  # [B]
    is_boosted: Tensor  # [B, m], bool
    divergence: Tensor  # [1, B, m]: ball KL; or [3, B, m], where emitted KL and TV were asked for

    @classmethod
    def joined(cls, rounds: Sequence[Round]) -> Round:
        """Several rounds as one, in which a row stands as often as it took part; shorter ones are filled up."""
        widths = [round.tokens.shape[1] for round in rounds]
        missing = [max(widths) - width for width in widths]
        return cls(*(_joined(values, missing) for values in zip(*rounds, strict=True)))

    def is_in(self, count: Tensor) -> Tensor:
        """[B, m + 1]: whether a place in the block is among the first `count` [B]."""
        return torch.arange(self.tokens.shape[1]) < count[:, None]

    def kinds(self) -> Tensor:
        """[B, m + 1] int8: the [`TokenKind`] of each token of the block."""
        last = torch.where(self.num_accepted < self.num_drafted, int(TokenKind.REPLACED), int(TokenKind.EXTRA))
        kinds = torch.where(self.is_in(self.num_accepted), int(TokenKind.ACCEPTED), last[:, None])
        kinds[:, :-1][self.is_in(self.num_accepted)[:, :-1] & self.is_boosted] = int(TokenKind.BOOSTED)
        return kinds.to(torch.int8)


def _joined(values: Sequence[Tensor], missing: Sequence[int]) -> Tensor:
    """One field of several rounds; `missing` columns are filled up where it has any."""
    if values[0].dim() == 1:
        return torch.cat(list(values))
    padded = [torch.nn.functional.pad(v, (0, n)) if n else v for v, n in zip(values, missing, strict=True)]
    return torch.cat(padded, dim=-2)


@dataclass
class Recorder:
    """Adds up rounds into [`SpeculationStats`], many at a time, as a round of small models takes hardly longer.

    Args:
        num_rows (`int`): R.
        with_emitted (`bool`): whether divergences of the emitted law are recorded.
    """

    num_rows: int
    with_emitted: bool

    def __post_init__(self) -> None:
        self.drafted, self.verified, self.accepted, self.emitted, self.rounds = (
            torch.zeros(self.num_rows, dtype=torch.long) for _ in range(5)
        )
        self.by_position = torch.zeros(self.num_rows, 0, dtype=torch.long)
        self.kinds = torch.full((self.num_rows, 1), int(TokenKind.PAD), dtype=torch.int8)
        self.divergence = torch.zeros(3 if self.with_emitted else 1, self.num_rows, dtype=torch.float64)
        self.pending: list[Round] = []

    def add_first(self, rows: Tensor, num_emitted: Tensor) -> None:
        """The token drawn behind the prompt belongs to no round."""
        self.kinds[rows, 0] = int(TokenKind.FIRST)
        self.emitted[rows] += num_emitted

    def add(self, round: Round) -> None:
        self.pending.append(round)
        if len(self.pending) == MOST_PENDING:
            self._settle()

    def last_kinds(self, count: int) -> Tensor:
        """[count]: the [`TokenKind`] of the last tokens of the first row."""
        self._settle()
        end = int(self.emitted[0])
        return self.kinds[0, end - count : end]

    def _settle(self) -> None:
        """Count the rounds that are pending."""
        if not self.pending:
            return
        round = Round.joined(self.pending)
        self.pending = []
        # A row that ended inside the block has nothing behind its end, drafts included
        accepted, verified = (torch.minimum(n, round.num_emitted) for n in (round.num_accepted, round.num_drafted))
        self.emitted.index_add_(0, round.rows, round.num_emitted)
        self.accepted.index_add_(0, round.rows, accepted)
        self.verified.index_add_(0, round.rows, verified)
        self.drafted.index_add_(0, round.rows, torch.where(round.has_ended, verified, round.num_drafted))
        self.rounds.index_add_(0, round.rows, torch.ones_like(accepted))
        divergence = round.divergence.where(round.is_in(verified)[:, :-1], 0.0).sum(-1)
        self.divergence.index_add_(1, round.rows, divergence)
        is_kept = round.is_in(accepted)[:, :-1].long()
        self.by_position = _with_columns(self.by_position, is_kept.shape[1], 0)
        self.by_position[:, : is_kept.shape[1]].index_add_(0, round.rows, is_kept)
        self._settle_kinds(round)

    def _settle_kinds(self, round: Round) -> None:
        self.kinds = _with_columns(self.kinds, int(self.emitted.max()), int(TokenKind.PAD))
        is_emitted = round.is_in(round.num_emitted)
        batch, place = is_emitted.nonzero(as_tuple=True)
        self.kinds[round.rows[batch], round.begin[batch] + place] = round.kinds()[is_emitted]

    def stats(self) -> SpeculationStats:
        self._settle()
        ball, *emitted = self.divergence
        return SpeculationStats(
            self.drafted,
            self.verified,
            self.accepted,
            self.emitted,
            self.rounds,
            self.by_position,
            self.kinds[:, : int(self.emitted.max())],
            ball,
            *emitted,
        )


def _with_columns(values: Tensor, num_columns: int, fill: int) -> Tensor:
    """With `num_columns` columns at least, the new ones holding `fill`."""
    missing = num_columns - values.shape[1]
    return values if missing <= 0 else torch.nn.functional.pad(values, (0, missing), value=fill)


_TRACKED: ContextVar[list[SpeculationStats] | None] = ContextVar("cactus_hf_tracked", default=None)


@contextmanager
def track() -> Iterator[list[SpeculationStats]]:
    """Collects the statistics of every `generate()` call made inside, for callers who do not see its return value.

    Calls are those of this thread (or asyncio task); of nested blocks, the innermost collects.

    ```python
    with cactus_hf.track() as stats:
        pipe(prompts, cactus_delta=1.0)
    print([call.accepted_length for call in stats])
    ```
    """
    calls: list[SpeculationStats] = []
    token = _TRACKED.set(calls)
    try:
        yield calls
    finally:
        _TRACKED.reset(token)


def publish(stats: SpeculationStats) -> None:
    calls = _TRACKED.get()
    if calls is not None:
        calls.append(stats)
