"""Acceptance rules: when a drafted token is kept, and what replaces it when it is not.

A rule looks at one position. `q` is the target's law there and `p` the draft's, both after the user's logits
processors; `n` is the drafted token, a draw from `p`. A rule is a frozen dataclass of its parameters with two pure
functions:

* `accept`: the probability of keeping `n`, from a few scalars of the position;
* `residual`: the weights over the vocabulary from which a replacement is drawn once `n` has been rejected.

Whatever the rule, the token after a draft kept in full is drawn from the target alone. `verification.py` puts the two
functions to work; `law.py` gives the law of what comes out.

Papers: Cactus, arXiv 2604.04987; speculative sampling, arXiv 2211.17192 and 2302.01318; mixture, arXiv 2604.07622.
Some of them call the target `p`; here the target is `q` throughout.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from .divergences import check_divergence, raise_prob
from .parameters import Parameter, check_delta, check_parameter, per_row


class Drafted(NamedTuple):
    """What a rule may know of drafted tokens: scalars of one shape, `[B, m]` in `accept` and `[B]` in `residual`."""

    target_prob: Tensor  # q_n
    draft_prob: Tensor  # p_n; 1 if the draft gives token ids without probabilities
    entropy: Tensor | None = None  # of the target's row, in nats; there if the rule needs "entropy"
    rank: Tensor | None = None  # number of tokens strictly more likely to the target; there if the rule needs "rank"
    raised_prob: Tensor | None = None  # gamma_n, if the rule's `raised_prob` was asked before
    from_rows: Tensor | None = None  # [..., k], what `read_rows` made of both rows; there if the rule needs "rows"
    delta: Tensor | None = None  # what `kl_budget.py` found at the position; there if the rule needs "delta"


@dataclass(frozen=True, eq=False)
class AcceptanceRule(ABC):
    """
    Base of the acceptance rules; a new one is a subclass under `@dataclass(frozen=True, eq=False)`, as this class is.

    Parameters may be one number, or a tensor `[B]` with one value a row.

    Class attributes:
        needs (`frozenset[str]`):
            What `accept` reads of [`Drafted`] beyond the two probabilities: `"entropy"` and `"rank"`, each a pass over
            the target's rows, `"rows"`, `from_rows`, and `"delta"`, which goes by both rows as well.
        shares_residual (`bool`):
            Whether `residual` is the same whichever token was rejected. [`emitted_law`] relies on it.
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    shares_residual: ClassVar[bool] = False

    @abstractmethod
    def accept(self, drafted: Drafted) -> Tensor:
        """The probability, in [0, 1], of keeping each drafted token."""

    def read_rows(self, target_probs: Tensor, draft_probs: Tensor) -> Tensor:
        """
        A few numbers `[..., k]` that `accept` and `residual` need of the whole rows `[..., V]`, in float64.

        Asked before them, for rules that need `"rows"`.
        """
        raise NotImplementedError(f'{type(self).__name__} needs "rows", so it needs `read_rows`.')

    def residual_scales(self, drafted: Drafted) -> tuple[Tensor | float, Tensor | float] | None:
        """
        Factors a and b, 0 or more, of a residual that is max(a q - b p, 0); `None` if it has another form.

        Each is a number or has the shape of `drafted`. The kernels draw from residuals of this form only.
        """
        return None

    def residual(self, target_probs: Tensor, draft_probs: Tensor, drafted: Drafted) -> Tensor:
        """
        Weights `[B, V]`, of any sum, of the token that replaces a rejected one. Where they sum to 0, q is used.

        Made of `residual_scales`; a rule without them has a `residual` of its own.
        """
        scales = self.residual_scales(drafted)
        if scales is None:
            raise NotImplementedError(f"{type(self).__name__} needs `residual_scales` or `residual`.")
        return (_scaled(target_probs, scales[0]) - _scaled(draft_probs, scales[1])).clamp_(min=0)

    def raised_prob(self, drafted: Drafted) -> Tensor:
        """The probability of `n` in the law aimed at once `n` is known: q_n, unless the rule raises it."""
        return drafted.target_prob

    # The equality of dataclasses would ask a tensor for one truth value.
    def _key(self) -> tuple[Any, ...]:
        values = [getattr(self, field.name) for field in fields(self)]
        return (type(self), *(tuple(value.tolist()) if isinstance(value, Tensor) else value for value in values))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AcceptanceRule) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())


@dataclass(frozen=True, eq=False, repr=False)
class Cactus(AcceptanceRule):
    """
    Cactus: speculative sampling towards the target with the drafted token raised from q_n to gamma_n.

    Given `n`, the law aimed at is h_n = gamma_n and h_i = s q_i for i != n, with s = (1 - gamma_n) / (1 - q_n). Among
    the laws near the target it keeps `n` most often (Theorem 2, Corollary 5). By default KL(h || q) is at most
    ln(1 + 2 delta) nats; with `solver="exact"`, D(h || q) is at most delta. As h changes with `n`, the law emitted is
    yet another one: see [`emitted_law`].

    Either `delta` is given, or a budget of the emitted law's own divergence, for which each position's delta is then
    found: the largest that keeps within it. That takes whole rows of both laws.

    Args:
        delta (`float` or `Tensor` of shape `[B]`):
            Budget in nats. 0 is speculative sampling, exactly; `inf` keeps every token that the target can emit.
        kl_budget (`float` or `Tensor` of shape `[B]`):
            Most nats of KL(h_alg || q) at a position, h_alg being the law that it emits.
        kl_total (`float` or `Tensor` of shape `[B]`):
            Most nats that the positions of a sequence may have in sum, up to and including each round's first
            rejection; what follows them is lossless. With or without `kl_budget`. [`verify`] takes its block for all
            there is of a sequence; `generate()` carries on what is left.
        divergence (`str`, *optional*, defaults to `"kl"`):
            What delta bounds: see [`gamma`].
        solver (`str`, *optional*, defaults to `"taylor"`):
            How gamma is found: by the divergence's second order, or `"exact"`.

    Example:

    ```python
    >>> import torch
    >>> from cactus_hf.acceptance import Cactus, Drafted
    >>> drafted = Drafted(target_prob=torch.tensor([0.2]), draft_prob=torch.tensor([0.8]))
    >>> Cactus(delta=0.5).accept(drafted)  # gamma / p = (0.2 + sqrt(2 * 0.5 * 0.2 * 0.8)) / 0.8
    tensor([0.7500])

    ```
    """

    delta: Parameter | None = None
    kl_budget: Parameter | None = field(default=None, kw_only=True)
    kl_total: Parameter | None = field(default=None, kw_only=True)
    divergence: str = field(default="kl", kw_only=True)
    solver: str = field(default="taylor", kw_only=True)

    def __post_init__(self) -> None:
        given = [name for name in ("delta", "kl_budget", "kl_total") if getattr(self, name) is not None]
        if not given or ("delta" in given and len(given) > 1):
            raise ValueError(
                "`Cactus` takes either `delta`, or `kl_budget` and `kl_total` or one of these; got "
                f"{' and '.join(f'`{name}`' for name in given) or 'none of them'}."
            )
        for name in given:
            object.__setattr__(self, name, check_delta(getattr(self, name), name))
        if "delta" not in given:
            object.__setattr__(self, "needs", frozenset({"delta"}))  # this one's, over the class's own
        check_divergence(self.divergence, self.solver)

    def raised_prob(self, drafted: Drafted) -> Tensor:
        if drafted.raised_prob is not None:
            return drafted.raised_prob
        if self._is_lossless:
            return drafted.target_prob
        delta = drafted.delta if self.delta is None else per_row(self.delta, drafted.target_prob)
        return self.raise_to(drafted.target_prob, cast(Tensor | float, delta))

    @property
    def _is_lossless(self) -> bool:
        """Whether it is known, without a look at a tensor, that nothing is raised: that spares operations."""
        return not isinstance(self.delta, Tensor) and self.delta == 0

    def __repr__(self) -> str:
        values = ((each.name, each.default, getattr(self, each.name)) for each in fields(self))
        given = [f"{name}={value!r}" for name, usual, value in values if isinstance(value, Tensor) or value != usual]
        return f"Cactus({', '.join(given)})"

    def raise_to(self, target_prob: Tensor, delta: Tensor | float) -> Tensor:
        """gamma at a delta that broadcasts against q_n."""
        return raise_prob(target_prob, delta, self.divergence, self.solver)

    def accept(self, drafted: Drafted) -> Tensor:
        return keep_at_most(self.raised_prob(drafted), drafted.draft_prob)

    def residual_scales(self, drafted: Drafted) -> tuple[Tensor | float, float]:
        if self._is_lossless:
            return 1.0, 1.0
        # (h - p)_+. It is 0 at n without a special case, as n is rejected only if p_n > gamma_n >= q_n >= s q_n.
        return scale_of_others(self.raised_prob(drafted), drafted.target_prob), 1.0


@dataclass(frozen=True, eq=False)
class SpeculativeSampling(AcceptanceRule):
    """Lossless speculative sampling: whatever the draft, the law emitted is the target's."""

    shares_residual: ClassVar[bool] = True

    def accept(self, drafted: Drafted) -> Tensor:
        return keep_at_most(drafted.target_prob, drafted.draft_prob)

    def residual_scales(self, drafted: Drafted) -> tuple[float, float]:
        return 1.0, 1.0


@dataclass(frozen=True, eq=False)
class Mixture(AcceptanceRule):
    """
    Emit exactly the mixture v = weight q + (1 - weight) p.

    This rule alone can emit tokens that the target's top-k or top-p has removed: v is positive wherever the draft is.

    Args:
        weight (`float` or `Tensor` of shape `[B]`):
            Weight of the **target**, between 0 and 1, both excluded: transformers' `assistant_ensemble_weight`.
    """

    weight: Parameter

    shares_residual: ClassVar[bool] = True

    def __post_init__(self) -> None:
        need = "between 0 and 1, both excluded (1 is `SpeculativeSampling()`)"
        object.__setattr__(self, "weight", check_parameter("weight", self.weight, lambda x: (x > 0) & (x < 1), need))

    def accept(self, drafted: Drafted) -> Tensor:
        # v written as p + weight (q - p), so that rounding cannot bring it below p where q >= p.
        excess = drafted.target_prob - drafted.draft_prob
        return keep_at_most(drafted.draft_prob + per_row(self.weight, excess) * excess, drafted.draft_prob)

    def residual_scales(self, drafted: Drafted) -> tuple[float, float]:
        return 1.0, 1.0


def scale_of_others(raised_prob: Tensor, target_prob: Tensor) -> Tensor:
    """The factor s on every token but n when n goes from q_n to gamma_n; 0 where q_n = 1 leaves no other token."""
    return torch.where(target_prob < 1, (1 - raised_prob) / (1 - target_prob), 0.0)


def _scaled(probs: Tensor, scale: Tensor | float) -> Tensor:
    """Rows `[B, V]` times a number, or one `[B]` a row."""
    if isinstance(scale, Tensor):
        return scale.to(probs.dtype).unsqueeze(-1) * probs
    return probs if scale == 1 else scale * probs


def keep_at_most(law_prob: Tensor, draft_prob: Tensor) -> Tensor:
    """min(1, h_n / p_n): exactly 1 where h_n >= p_n, and 0 where h_n = 0, even if p_n is 0 as well."""
    return (law_prob / draft_prob).nan_to_num_(nan=0.0).clamp_(max=1)
