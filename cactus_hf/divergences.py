"""f-divergences between laws, and gamma: how far Cactus raises a drafted token within one of them.

For a convex f with f(1) = 0, D_f(h || q) is the sum of q f(h / q). Given a drafted token n, Cactus aims at the law h
in the ball D_f(h || q) <= delta that has the largest h_n. It is h_n = gamma and h_i = q_i (1 - gamma) / (1 - q_n),
where gamma is the root in [q_n, 1] of

    q_n f(gamma / q_n) + (1 - q_n) f((1 - gamma) / (1 - q_n)) = delta

or 1 if there is none (Theorem 2 of arXiv 2604.04987, which calls the target q as well).
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from .parameters import Parameter, check_delta, check_parameter


SOLVERS = ("taylor", "exact")
# Each step keeps one part of what is left of [q, 1]; in the end it is 2^-60 of it. Fewer steps with more parts launch
# fewer operations, each on a few numbers.
PARTS, STEPS = 8, 20


class Divergence(NamedTuple):
    """
    A divergence D_f.

    Args:
        formula (`Callable`): (h, q) -> q f(h / q), for some plus a multiple of h - q, which sums to 0: no term is then
            negative, and those of laws that are near each other do not drown in rounding.
        curvature (`float`, *optional*): f''(1); `None` where f has a kink at 1.
        root (`Callable`, *optional*): (q, delta) -> gamma in closed form, for q in (0, 1]; may be above 1.
    """

    formula: Callable[[Tensor, Tensor], Tensor]
    curvature: float | None
    root: Callable[[Tensor, Tensor], Tensor] | None = None

    def terms(self, law: Tensor, target: Tensor) -> Tensor:
        """What each token adds to D_f(h || q); 0 where both are 0."""
        return torch.where(law == target, 0.0, self.formula(law, target))


def gamma(q: Parameter, delta: Parameter, divergence: str = "kl", solver: str = "taylor") -> float | Tensor:
    """
    The probability to which Cactus raises a drafted token; min(1, q + sqrt(2 delta q (1 - q))) by default.

    Args:
        q (`float` or `Tensor`):
            The target's probability of the drafted token.
        delta (`float` or `Tensor` that broadcasts against `q`):
            Budget, 0 or more, `inf` allowed; in nats for `"kl"`, `"reverse_kl"` and `"js"`. Unlike a rule's parameter
            `[B]`, it is not aligned with rows.
        divergence (`str`, *optional*, defaults to `"kl"`):
            What the budget bounds. With t = h / q, f is t log t for `"kl"`, (t - 1)^2 for `"chi2"` (Pearson's),
            -log t for `"reverse_kl"`, (t - 1)^2 / t for `"neyman"`, |t - 1| / 2 for `"tv"` (total variation),
            1 - sqrt(t) for `"hellinger"` (squared) and (t log t - (1 + t) log((1 + t) / 2)) / 2 for `"js"`
            (Jensen-Shannon).
        solver (`str`, *optional*, defaults to `"taylor"`):
            `"taylor"` takes f up to its second order at 1: min(1, q + sqrt(2 delta q (1 - q) / f''(1))) (Corollary 5).
            `"exact"` finds the largest gamma within the budget, in closed form or by a search in float64.

    Returns:
        `float`, or `Tensor` in the dtype of `q`: gamma, at least `q` and at most 1. It is `q` at delta 0 and, at delta
        `inf`, 1 wherever `q` is not 0; a token the target cannot emit stays at 0 for every delta and divergence.

    Raises:
        ValueError: for a `q` that is no probability, a negative `delta`, shapes that do not broadcast, an unknown
            name, and for `"tv"` with the solver `"taylor"`, as |t - 1| has no second-order expansion.

    Example:

    ```python
    >>> from cactus_hf import gamma
    >>> round(gamma(0.2, delta=0.5), 9), round(gamma(0.2, delta=0.5, solver="exact"), 9)
    (0.6, 0.661431059)
    >>> gamma(0.2, 0.5, "tv", "exact"), gamma(0.2, delta=float("inf")), gamma(0.0, delta=float("inf"))
    (0.7, 1.0, 0.0)

    ```
    """
    check_divergence(divergence, solver)
    flat_q, flat_delta = (x.flatten() if isinstance(x, Tensor) else x for x in (q, delta))
    checked_q = check_parameter("q", flat_q, lambda x: (x >= 0) & (x <= 1), "in [0, 1], a probability")
    checked_delta = check_delta(flat_delta)
    probs = q if isinstance(q, Tensor) and q.is_floating_point() else torch.as_tensor(q, dtype=torch.float64)
    deltas = torch.as_tensor(delta, dtype=probs.dtype)
    try:
        torch.broadcast_shapes(probs.shape, deltas.shape)
    except RuntimeError:
        raise ValueError(
            f"`q` has the shape {list(probs.shape)} and `delta` {list(deltas.shape)}, which do not broadcast: give "
            "one delta, or one for each `q`."
        ) from None
    raised = raise_prob(probs, deltas, divergence, solver)
    is_number = not isinstance(checked_q, Tensor) and not isinstance(checked_delta, Tensor)
    return raised.item() if is_number else raised


def check_divergence(divergence: str, solver: str = "exact") -> None:
    """Raises `ValueError` for names that there are not, and for `"taylor"` where it cannot be."""
    for name, value, known in (("divergence", divergence, tuple(DIVERGENCES)), ("solver", solver, SOLVERS)):
        if not isinstance(value, str) or value not in known:
            raise ValueError(f"`{name}` must be one of {', '.join(map(repr, known))}; got {value!r}.")
    if solver == "taylor" and DIVERGENCES[divergence].curvature is None:
        raise ValueError(
            f'`divergence={divergence!r}` has no second-order expansion (f has a kink at 1): pass `solver="exact"`.'
        )


def raise_prob(target_prob: Tensor, delta: float | Tensor, divergence: str, solver: str) -> Tensor:
    """[`gamma`] without its checks and without waiting for the device; `delta` is a number or broadcasts."""
    kind = DIVERGENCES[divergence]
    if solver == "taylor" and kind.curvature is not None:
        return _expanded(target_prob, 2 / kind.curvature * delta).clamp(max=1)
    wide = target_prob.double()
    budget = delta.double() if isinstance(delta, Tensor) else torch.full_like(wide, delta)
    found = _searched(kind, wide, budget) if kind.root is None else kind.root(wide, budget)
    found = torch.where(budget > 0, found.clamp(max=1), wide).to(target_prob.dtype)
    # The guard: the ball of some divergences reaches tokens that the target cannot emit
    return torch.where(target_prob > 0, torch.maximum(found, target_prob), 0.0)


def _expanded(prob: Tensor, delta: float | Tensor) -> Tensor:
    """q + sqrt(delta q (1 - q)), the root of Pearson's chi2."""
    variance = prob * (1 - prob)
    # At q = 0 and q = 1 there is no bonus, whatever delta: the formula would give inf * 0 at delta inf.
    return prob + (delta * variance).sqrt().nan_to_num(nan=0.0, posinf=torch.inf)


def _searched(kind: Divergence, prob: Tensor, delta: Tensor) -> Tensor:
    """The largest float64 found in [q, 1] whose divergence is at most delta."""
    prob, delta = torch.broadcast_tensors(prob, delta)
    target = torch.stack([prob, 1 - prob]).unsqueeze(1)
    inner = torch.arange(1, PARTS, dtype=prob.dtype, device=prob.device).view(-1, *[1] * prob.dim())

    def is_within(raised: Tensor) -> Tensor:
        return kind.terms(torch.stack([raised, 1 - raised]), target).sum(0) <= delta

    low, width = prob, 1 - prob
    for _ in range(STEPS):
        width = width / PARTS
        low = low + width * is_within(low + width * inner).sum(0)  # it grows with gamma: so many are within
    return torch.where(is_within(torch.ones_like(low).unsqueeze(0)).squeeze(0), 1.0, low)


def _neyman_root(prob: Tensor, delta: Tensor) -> Tensor:
    share = 1 / (1 + 1 / delta)  # delta / (1 + delta), also for delta inf
    return prob * (1 - share) + (share + (share**2 + 4 * share * (1 - share) * prob * (1 - prob)).sqrt()) / 2


def _hellinger_root(prob: Tensor, delta: Tensor) -> Tensor:
    """sin^2(arcsin sqrt(q) + arccos(1 - delta)), expanded: exact at delta 0."""
    cosine = 1 - delta.clamp(max=1)
    sine2 = 1 - cosine**2
    raised = prob + sine2 * (1 - 2 * prob) + 2 * cosine * (sine2 * prob * (1 - prob)).sqrt()
    return torch.where(cosine**2 * (1 - prob) > sine2 * prob, raised, 1.0)  # else the angle is beyond pi / 2


def _times_log(weight: Tensor, law: Tensor, target: Tensor) -> Tensor:
    """weight log(h / q), 0 where the weight is."""
    gain = law - target
    # Near 1 by its logarithm's own series; elsewhere 1 + gain / q would round h away
    ratio = torch.where(gain.abs() < target / 2, torch.log1p(gain / target), law.log() - target.log())
    return torch.where(weight > 0, weight * ratio, 0.0)


def _jensen_shannon(law: Tensor, target: Tensor) -> Tensor:
    middle = (law + target) / 2
    return (_times_log(law, law, middle) + _times_log(target, target, middle)) / 2


DIVERGENCES = MappingProxyType(
    {
        "kl": Divergence(lambda h, q: _times_log(h, h, q) - (h - q), 1.0),
        "chi2": Divergence(lambda h, q: (h - q) ** 2 / q, 2.0, _expanded),
        "reverse_kl": Divergence(lambda h, q: h - q - _times_log(q, h, q), 1.0),
        "neyman": Divergence(lambda h, q: (h - q) ** 2 / h, 2.0, _neyman_root),
        "tv": Divergence(lambda h, q: (h - q).abs() / 2, None, lambda q, delta: q + delta),
        "hellinger": Divergence(lambda h, q: (h.sqrt() - q.sqrt()) ** 2 / 2, 0.25, _hellinger_root),
        "js": Divergence(_jensen_shannon, 0.25),
    }
)
