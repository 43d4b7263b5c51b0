"""The law that a verified position emits, in closed form, and its distance from the target.

With `q` the target's law and `p` the draft's, a position emits

    h_alg(x) = p_x phi(x) + sum_n p_n (1 - phi(n)) g_n(x)

where `phi` is the rule's acceptance and `g_n` its residual after `n` was rejected. For every rule but Cactus, g is the
same for all `n`. For Cactus (arXiv 2604.04987, which calls the target q as well) g_n is (s_n q - p)_+ / Z_n, and
sorting brings the sum over pairs of tokens from V^2 to V log V steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .acceptance import AcceptanceRule, Cactus, Drafted, scale_of_others
from .checks import check_laws
from .kl_budget import find_deltas, has_budget, most_set
from .parameters import move_rule
from .probabilities import laws_at, on_support


def emitted_law(target_probs: Tensor, draft_probs: Tensor, rule: AcceptanceRule) -> Tensor:
    """
    The law of the token emitted at a verified position: the drafted one if it is kept, else its replacement.

    Args:
        target_probs (`Tensor` of shape `[..., V]`):
            The target's probabilities, after logits processors.
        draft_probs (`Tensor` of shape `[..., V]`):
            The draft's; one-hot where the draft gives a token id without probabilities.
        rule ([`AcceptanceRule`]):
            The rule. Parameters given one a row, `[B]`, go with inputs of shape `[B, ..., V]`.

    Returns:
        `Tensor` of shape `[..., V]`, float64.

    For [`SpeculativeSampling`] and `Cactus(0)` it is the target. For `Cactus(delta)` it lies between the two laws at
    every token, so it keeps the target's support and is, by any f-divergence, no farther from the target than the
    draft is; `delta` itself does not bound its divergence, only that of the law aimed at for each drafted token.

    Example:

    ```python
    >>> import torch
    >>> from cactus_hf import Cactus, SpeculativeSampling, emitted_law
    >>> target, draft = torch.tensor([0.2, 0.3, 0.5]), torch.tensor([0.8, 0.2, 0.0])
    >>> emitted_law(target, draft, SpeculativeSampling())
    tensor([0.2000, 0.3000, 0.5000], dtype=torch.float64)
    >>> emitted_law(target, draft, Cactus(0.5))
    tensor([0.6000, 0.2000, 0.2000], dtype=torch.float64)

    ```
    """
    check_laws(target_probs, draft_probs, rule)
    return emission(target_probs.double(), draft_probs.double(), move_rule(rule, target_probs.device))[0]


def emitted_divergence(
    target_logits: Tensor, draft_logits: Tensor | None, rule: AcceptanceRule, *, draft_tokens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """
    How far the emitted law is from the target's at each drafted position.

    Args:
        target_logits (`Tensor` of shape `[B, m, V]`):
            The target's logits at the drafted positions, after logits processors.
        draft_logits (`Tensor` of shape `[B, m, V]`, or `None`):
            The draft's. `None` for drafts without probabilities; then `draft_tokens` are needed.
        rule ([`AcceptanceRule`]):
            The rule, its parameters one number or one a row.
        draft_tokens (`Tensor` of shape `[B, m]`, *optional*):
            The drafted tokens.

    Returns:
        `tuple` of two `Tensor` of shape `[B, m]`, float64: the Kullback-Leibler divergence KL(h_alg || q) in nats, and
        the total variation distance. The former may be infinite for [`Mixture`], which can emit what the target
        cannot; the other rules keep the target's support. Nothing is checked: logits that are no law give NaN.
    """
    if draft_logits is not None:
        target_logits, draft_logits = on_support(target_logits, draft_logits)
    kl = torch.zeros(target_logits.shape[:2], dtype=torch.float64, device=target_logits.device)
    tv = torch.zeros_like(kl)
    if draft_logits is None and draft_tokens is None:
        raise ValueError("`draft_logits` is None, so `draft_tokens` are needed: pass the ids that were drafted.")
    # One position at a time, as the closed form takes about ten copies of its rows.
    for position in range(target_logits.shape[1]):
        target_probs, draft_probs = laws_at(target_logits, draft_logits, draft_tokens, position)
        law, _ = emission(target_probs, draft_probs, rule)
        kl[:, position], tv[:, position] = distances(law, target_probs)
    return kl, tv


def distances(law: Tensor, target_probs: Tensor) -> tuple[Tensor, Tensor]:
    """KL(h || q) in nats and the total variation of laws [..., V] from the target's."""
    kl = (torch.xlogy(law, law) - torch.xlogy(law, target_probs)).sum(-1).clamp(min=0)
    return kl, (law - target_probs).abs().sum(-1) / 2


def has_closed_form(rule: AcceptanceRule) -> bool:
    """Whether [`emitted_law`] knows what the rule emits."""
    return isinstance(rule, Cactus) or rule.shares_residual


def emission(target_probs: Tensor, draft_probs: Tensor, rule: AcceptanceRule) -> tuple[Tensor, Tensor]:
    """The law emitted [..., V], float64, and the part of it that are kept drafts."""
    drafted = _draft_every_token(target_probs, draft_probs, rule)
    if isinstance(rule, Cactus):
        raised = rule.raised_prob(drafted)
        return _cactus_law(target_probs, draft_probs, raised), torch.minimum(draft_probs, raised)
    if not has_closed_form(rule):
        raise ValueError(
            f"There is no closed form for {type(rule).__name__}, as its residual may depend on the rejected token. "
            "If it does not, set the class attribute `shares_residual = True`."
        )
    kept = draft_probs * rule.accept(drafted)
    if drafted.from_rows is not None:
        drafted = drafted._replace(from_rows=drafted.from_rows.squeeze(-2))  # of the row, which no token is chosen of
    residual = rule.residual(target_probs, draft_probs, drafted)
    total = residual.sum(-1, keepdim=True)
    replacement = torch.where(total > 0, residual / total, target_probs)
    return kept + (draft_probs - kept).sum(-1, keepdim=True) * replacement, kept


def _draft_every_token(target_probs: Tensor, draft_probs: Tensor, rule: AcceptanceRule) -> Drafted:
    """What the rule would know of each token of the vocabulary, had that one been drafted."""
    entropy = rank = from_rows = delta = None
    if has_budget(rule):
        delta = find_deltas(target_probs, draft_probs, rule).delta.unsqueeze(-1)
    if "entropy" in rule.needs:
        entropy = torch.special.entr(target_probs).sum(-1, keepdim=True)
    if "rank" in rule.needs:
        ascending = target_probs.sort(-1).values
        rank = target_probs.shape[-1] - torch.searchsorted(ascending, target_probs.contiguous(), right=True)
    if "rows" in rule.needs:
        from_rows = rule.read_rows(target_probs, draft_probs).unsqueeze(-2)
    return Drafted(target_probs, draft_probs, entropy, rank, from_rows=from_rows, delta=delta)


def _cactus_law(target_probs: Tensor, draft_probs: Tensor, raised_probs: Tensor) -> Tensor:
    ratio, order = law_ratio(target_probs, draft_probs).sort(-1)
    target, draft, raised = (probs.gather(-1, order) for probs in (target_probs, draft_probs, raised_probs))
    law = sorted_cactus_law(target, draft, raised, ratio)
    return torch.empty_like(law).scatter_(-1, order, law)


def law_ratio(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """p_x / q_x; infinite where the target is 0."""
    return torch.where(target_probs > 0, draft_probs / target_probs, torch.inf)


def sorted_cactus_law(target_probs: Tensor, draft_probs: Tensor, raised_probs: Tensor, ratio: Tensor) -> Tensor:
    """
    The law of Cactus for rows [..., V] whose tokens stand in ascending order of `ratio`, p_x / q_x: the law

        min(p_x, gamma_x) + q_x A(x) - p_x C(x)

    where A sums w_n s_n / Z_n, and C sums w_n / Z_n, over the n with s_n > p_x / q_x. There w_n = (p_n - gamma_n)_+ is
    the mass rejected at n, and Z_n the sum of its residual (s_n q - p)_+. In that residual are the x that stand before
    the place of s_n among the ratios, and n is not among them, as p_n > gamma_n >= q_n >= s_n q_n.
    """
    rejected = (draft_probs - raised_probs).clamp(min=0)
    scale = scale_of_others(raised_probs, target_probs)
    if rejected.is_cpu:  # they are a few of the vocabulary; a GPU would have to be waited for to know how many
        rejected, tokens = rejected.topk(most_set(rejected > 0), sorted=False)
        scale = scale.gather(-1, tokens)
    num_below = torch.searchsorted(ratio, scale)  # tokens x with p_x / q_x < s_n
    target_below = _sums_from_zero(target_probs).gather(-1, num_below)
    draft_below = _sums_from_zero(draft_probs).gather(-1, num_below)
    # Z_n >= w_n always; where rounding says otherwise, a quotient of rounding errors would come out.
    total = torch.maximum(scale * target_below - draft_below, rejected)
    share = torch.where(rejected > 0, rejected / total, 0.0)
    gained = target_probs * _sums_of_later(share * scale, num_below, target_probs.shape[-1])
    lost = draft_probs * _sums_of_later(share, num_below, target_probs.shape[-1])
    return torch.minimum(draft_probs, raised_probs) + (gained - lost).clamp(min=0)


def _sums_of_later(values: Tensor, places: Tensor, num_places: int) -> Tensor:
    """At each place 0 ... V - 1, the sum of the values whose own place, among 0 ... V, is a later one."""
    by_place = values.new_zeros(*values.shape[:-1], num_places + 1).scatter_add_(-1, places, values)
    return by_place.flip(-1).cumsum(-1)[..., :-1].flip(-1)


def _sums_from_zero(values: Tensor) -> Tensor:
    """Sums of the first 0, 1, ..., V values."""
    return torch.nn.functional.pad(values.cumsum(-1), (1, 0))
