"""The law of a text decoded in rounds, by enumeration: what `generate()` should sample for any rule
and draft length.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import reference

from cactus_hf import AcceptanceRule


Text = tuple[int, ...]
Law = Callable[[Text], list[float]]


def round_law(target: Law, draft: Law, rule: AcceptanceRule, num_drafts: int, num_tokens: int) -> dict[Text, float]:
    """Chances of the first `num_tokens` tokens.

    The first is the target's. Then come rounds of `num_drafts` drafts, each kept or replaced; a replaced one ends its
    round, and so does the extra token behind drafts that were all kept. `target` and `draft` give the laws after a
    text.
    """
    target, draft = cache(target), cache(draft)
    law: dict[Text, float] = {}

    def go_on(text: Text, chance: float, place: int, rule: AcceptanceRule) -> None:
        if chance == 0.0:
            return
        if len(text) == num_tokens:
            law[text] = law.get(text, 0.0) + chance
            return
        q = target(text)
        if place == num_drafts:
            for token, q_x in enumerate(q):
                go_on((*text, token), chance * q_x, 0, rule)
            return
        p = draft(text)
        then = reference.after_position(rule, q, p)
        for token, p_n in enumerate(p):
            phi = reference.accept(rule, q, p, token)
            go_on((*text, token), chance * p_n * phi, place + 1, then)
            if p_n * (1 - phi) > 0:
                for other, g_x in enumerate(reference.residual(rule, q, p, token)):
                    go_on((*text, other), chance * p_n * (1 - phi) * g_x, 0, then)

    go_on((), 1.0, num_drafts, rule)
    return law
