"""Slow twin of acceptance.py, verification.py and law.py: loops over float64, written from the formulas.

`q` is a row of the target's probabilities, `p` one of the draft's, `n` a drafted token. It shares no code with the
package but the rules' parameters, and reads like the definitions: draw n from p, keep it with probability phi(n), else
draw from g.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from torch import Tensor

from cactus_hf.acceptance import AcceptanceRule, Cactus, Mixture, SpeculativeSampling
from cactus_hf.bounded_rules import Lenience, Mentored
from cactus_hf.heuristic_rules import TopK, TypicalAcceptance


def parameter(value, row: int) -> float:
    return value[row].item() if isinstance(value, Tensor) else value


def softmax(logits: list[float]) -> list[float] | None:
    """The law of a row of logits, or `None` if it has none (NaN, +inf, nothing but -inf)."""
    if any(math.isnan(x) or x == math.inf for x in logits) or all(x == -math.inf for x in logits):
        return None
    peak = max(logits)
    weights = [math.exp(x - peak) for x in logits]
    return [weight / sum(weights) for weight in weights]


CURVATURE = {"kl": 1, "chi2": 2, "reverse_kl": 1, "neyman": 2, "hellinger": 1 / 4, "js": 1 / 4}  # f''(1)


@cache
def gamma(q_n: float, delta: float, divergence: str = "kl", solver: str = "taylor") -> float:
    if q_n == 0:
        return 0.0
    if q_n == 1 or delta == math.inf:
        return 1.0
    if solver == "taylor":
        return min(1.0, q_n + math.sqrt(2 * delta * q_n * (1 - q_n) / CURVATURE[divergence]))

    def distance(g: float) -> float:
        return q_n * f(divergence, g / q_n) + (1 - q_n) * f(divergence, (1 - g) / (1 - q_n))

    if distance(1.0) <= delta:
        return 1.0
    low, high = q_n, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if distance(middle) <= delta else (low, middle)
    return low if delta > 0 else q_n


def f(divergence: str, t: float) -> float:
    """The function of the divergence, as it is defined; its limit at t = 0."""
    if divergence == "tv":
        return abs(t - 1) / 2
    if divergence == "chi2":
        return (t - 1) * (t - 1)
    if divergence == "hellinger":
        return 1 - math.sqrt(t)
    if t == 0:
        return {"kl": 0.0, "reverse_kl": math.inf, "neyman": math.inf, "js": math.log(2) / 2}[divergence]
    if divergence == "kl":
        return t * math.log(t)
    if divergence == "reverse_kl":
        return -math.log(t)
    if divergence == "neyman":
        return (t - 1) * ((t - 1) / t)
    return (t * math.log(2 * t / (1 + t)) + math.log(2 / (1 + t))) / 2  # js


def f_divergence(divergence: str, h: Sequence[float], q: Sequence[float]) -> float:
    """D_f(h || q), the sum of q f(h / q), for an h on the support of q."""
    assert all(q_i > 0 or h_i == 0 for h_i, q_i in zip(h, q, strict=True))
    return math.fsum(q_i * f(divergence, h_i / q_i) for h_i, q_i in zip(h, q, strict=True) if q_i > 0)


def clamped(q: Sequence[float], p: Sequence[float], low: float, high: float) -> list[float]:
    return [min(max(p_i, low * q_i), high * q_i) if q_i > 0 else 0.0 for q_i, p_i in zip(q, p, strict=True)]


@cache
def mentored_law(q: tuple[float, ...], p: tuple[float, ...], budget: float, divergence: str) -> Sequence[float]:
    """clip(p, b q, a q) with the largest a whose divergence is within the budget; b is what makes it sum to 1."""
    by_ratio = sorted((p_i / q_i, q_i, p_i) for q_i, p_i in zip(q, p, strict=True) if q_i > 0)

    def law(high: float) -> list[float]:
        lacking = 1 - math.fsum(min(p_i, high * q_i) for _, q_i, p_i in by_ratio)
        low = lifted_q = lifted_p = 0.0
        for ratio, q_i, p_i in by_ratio:  # the least likely in the draft are lifted first
            if lacking <= 0 or (lifted_q > 0 and low <= ratio):
                break
            lifted_q, lifted_p = lifted_q + q_i, lifted_p + p_i
            low = (lacking + lifted_p) / lifted_q
        return clamped(q, p, min(low, 1.0), high)

    best, low, up = q, 1.0, max(by_ratio[-1][0], 1.0)
    if budget > 0 and f_divergence(divergence, law(up), q) <= budget:
        return law(up)
    for _ in range(64):
        middle = math.sqrt(low) * math.sqrt(up)
        h = law(middle)
        if f_divergence(divergence, h, q) <= budget:
            best, low = h, middle
        else:
            up = middle
    return best if budget > 0 else q


def law_aimed_at(q: list[float], n: int, gamma_n: float) -> list[float]:
    """h of Theorem 2."""
    return [gamma_n if i == n else (1 - gamma_n) * q_i / (1 - q[n]) if q[n] < 1 else 0.0 for i, q_i in enumerate(q)]


def divergence(h: list[float], q: list[float]) -> float:
    """KL(h || q) in nats."""
    return sum(h_i * math.log(h_i / q_i) if q_i > 0 else math.inf for h_i, q_i in zip(h, q, strict=True) if h_i > 0)


def keep_at_most(h_n: float, p_n: float) -> float:
    """min(1, h_n / p_n), and 0 for a token that h never emits."""
    if h_n == 0:
        return 0.0
    return 1.0 if h_n >= p_n else h_n / p_n


def delta_of(rule: Cactus, q: list[float], p: list[float], row: int = 0) -> float:
    if rule.delta is not None:
        return parameter(rule.delta, row)
    budgets = [parameter(limit, row) for limit in (rule.kl_budget, rule.kl_total) if limit is not None]
    return largest_delta(tuple(q), tuple(p), min(budgets), rule.divergence, rule.solver)


@cache
def largest_delta(q: tuple[float, ...], p: tuple[float, ...], budget: float, kind: str, solver: str) -> float:
    """The largest delta of which KL(h_alg || q) is at most the budget, to 7 digits; by halving."""

    def fits(delta: float) -> bool:
        law = emitted_law(Cactus(delta, divergence=kind, solver=solver), list(q), list(p))
        return divergence(law, list(q)) <= budget

    if budget == 0 or fits(math.inf):
        return math.inf if budget else 0.0
    low, high = -30.0, 30.0  # of log2(delta)
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(2**middle) else (low, middle)
    return 2**low


def after_position(rule: AcceptanceRule, q: list[float], p: list[float]) -> AcceptanceRule:
    """The rule for the position behind this one: what this one emits goes off `kl_total`."""
    if not isinstance(rule, Cactus) or rule.kl_total is None:
        return rule
    spent = divergence(emitted_law(rule, q, p), q)
    return replace(rule, kl_total=max(0.0, rule.kl_total - spent))


def raised_by(rule: Cactus, q: list[float], p: list[float], n: int, row: int) -> float:
    return gamma(q[n], delta_of(rule, q, p, row), rule.divergence, rule.solver)


def accept(rule: AcceptanceRule, q: list[float], p: list[float], n: int, row: int = 0) -> float:
    if isinstance(rule, Cactus):
        return keep_at_most(raised_by(rule, q, p, n, row), p[n])
    if isinstance(rule, SpeculativeSampling):
        return keep_at_most(q[n], p[n])
    if isinstance(rule, TypicalAcceptance):
        entropy = -sum(q_i * math.log(q_i) for q_i in q if q_i > 0)
        threshold = min(parameter(rule.epsilon, row), parameter(rule.alpha, row) * math.exp(-entropy))
        return float(q[n] == 1 or q[n] > threshold)
    if isinstance(rule, TopK):
        kth = sorted(q, reverse=True)[min(parameter(rule.k, row), len(q)) - 1]
        return float(q[n] > 0 and q[n] >= kth)
    if isinstance(rule, Lenience):
        return keep_at_most(q[n] / parameter(rule.leniency, row), p[n])
    if isinstance(rule, Mentored):
        h = mentored_law(tuple(q), tuple(p), parameter(rule.budget, row), rule.divergence)
        return keep_at_most(h[n], p[n])
    if isinstance(rule, Mixture):
        w = parameter(rule.weight, row)
        return keep_at_most(w * q[n] + (1 - w) * p[n], p[n])
    raise NotImplementedError(type(rule))


def residual(rule: AcceptanceRule, q: list[float], p: list[float], n: int, row: int = 0) -> list[float]:
    """g, the law of what replaces n."""
    if isinstance(rule, Cactus):
        h = law_aimed_at(q, n, raised_by(rule, q, p, n, row))
        weights = [max(0.0, h_i - p_i) for h_i, p_i in zip(h, p, strict=True)]
    elif isinstance(rule, Mentored):
        h = mentored_law(tuple(q), tuple(p), parameter(rule.budget, row), rule.divergence)
        weights = [max(0.0, h_i - p_i) for h_i, p_i in zip(h, p, strict=True)]
    elif isinstance(rule, (SpeculativeSampling, Mixture, Lenience)):
        weights = [max(0.0, q_i - p_i) for q_i, p_i in zip(q, p, strict=True)]
    elif isinstance(rule, TypicalAcceptance) and rule.recovery == "argmax":
        weights = [float(i == q.index(max(q))) for i in range(len(q))]
    else:
        weights = q
    total = sum(weights)
    return [weight / total for weight in weights] if total > 0 else q


def emitted_law(rule: AcceptanceRule, q: list[float], p: list[float], row: int = 0) -> list[float]:
    """The emitted law by enumeration of what is drafted, whether it is kept, and what replaces it."""
    law = [0.0] * len(q)
    for n, p_n in enumerate(p):
        phi = accept(rule, q, p, n, row)
        law[n] += p_n * phi
        if p_n * (1 - phi) > 0:
            for x, g_x in enumerate(residual(rule, q, p, n, row)):
                law[x] += p_n * (1 - phi) * g_x
    return law


def invert(weights: list[float], u: float) -> int:
    """The index at which the running sum first exceeds u times the total."""
    threshold, running, last = u * sum(weights), 0.0, 0
    for index, weight in enumerate(weights):
        running += weight
        if weight > 0:
            last = index
            if running > threshold:
                return index
    return last


def verify_row(
    rule: AcceptanceRule,
    row: int,
    target_logits: list[list[float]],
    tokens: list[int],
    draft_logits: list[list[float]] | None,
    draft_length: int,
    uniforms: list[float],
) -> dict:
    """One row of `verify`, token by token."""
    is_boosted, ball_kl = [False] * len(tokens), [0.0] * len(tokens)
    num_accepted, num_verified, next_token = 0, 0, None
    for i in range(draft_length):
        q, n = softmax(target_logits[i]), tokens[i]
        p = [float(x == n) for x in range(len(q))] if draft_logits is None else softmax(draft_logits[i])
        if p is None:
            draft_length = i
            break
        num_verified += 1
        if isinstance(rule, Cactus):
            gamma_n = raised_by(rule, q, p, n, row)
            ball_kl[i] = divergence([gamma_n, 1 - gamma_n], [q[n], 1 - q[n]])
        if not uniforms[i] < accept(rule, q, p, n, row):
            next_token = invert(residual(rule, q, p, n, row), uniforms[-1])
            break
        is_boosted[i] = not uniforms[i] < keep_at_most(q[n], p[n])
        num_accepted += 1
    if next_token is None:
        next_token = invert(softmax(target_logits[draft_length]), uniforms[-1])
    # A broken draft row behind the first rejection shortens the draft as well: it can't be told from the result.
    for i in range(draft_length):
        if draft_logits is not None and softmax(draft_logits[i]) is None:
            draft_length = i
            break
    return {
        "num_accepted": num_accepted,
        "next_token": next_token,
        "is_boosted": is_boosted,
        "ball_kl": ball_kl,
        "num_verified": num_verified,
        "draft_lengths": draft_length,
    }


def block_law(
    rule: AcceptanceRule,
    row: int,
    target: list[list[float]],
    draft: list[list[float]],
    draft_length: int,
    tokens: list[int] | None = None,
) -> dict[tuple[int, ...], float]:
    """
    The law of the tokens a block emits: the kept ones, then the next one. `target` and `draft` hold probabilities,
    which do not depend on the tokens. Those drafted are `tokens` if given, else drawn from `draft`.
    """
    law: dict[tuple[int, ...], float] = {}

    def add(emitted: tuple[int, ...], probability: float) -> None:
        if probability > 0:
            law[emitted] = law.get(emitted, 0.0) + probability

    def walk(i: int, kept: tuple[int, ...], probability: float) -> None:
        q = target[i]
        if i == draft_length:
            for x, q_x in enumerate(q):
                add((*kept, x), probability * q_x)
            return
        p = draft[i]
        for n, p_n in enumerate(p) if tokens is None else [(tokens[i], 1.0)]:
            if p_n == 0:
                continue
            phi = accept(rule, q, p, n, row)
            if phi > 0:
                walk(i + 1, (*kept, n), probability * p_n * phi)
            if phi < 1:
                for x, g_x in enumerate(residual(rule, q, p, n, row)):
                    add((*kept, x), probability * p_n * (1 - phi) * g_x)

    walk(0, (), 1.0)
    return law
