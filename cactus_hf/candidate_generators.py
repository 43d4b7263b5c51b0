"""Transformers' own candidate generators as sources of drafts, for one row.

They serve drafts that read the target's states (multi-token prediction layers, DFlash, Gemma 4 assistants), and those
whose tokenizer shares no token with the target's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .cached_model import CroppedModel
from .drafting import Drafts
from .model_inputs import extended
from .sequences import Sequences


if TYPE_CHECKING:
    from .host import Host


SEED_BITS = 2**53  # of a uniform in float64


class GeneratorSource:
    """
    Args:
        generator (`CandidateGenerator`): new, as its state is that of one call.
        model (`CroppedModel`): the target, holding the prompt and keeping its outputs.
        is_sampled (`bool`): whether the generator draws its drafts; else their law is one-hot, whatever logits come
            with them.
    """

    def __init__(self, generator: Any, model: CroppedModel, is_sampled: bool):
        self.generator, self.model, self.is_sampled = generator, model, is_sampled
        self.length: int | None = None  # committed tokens in the last round

    def propose(self, sequences: Sequences, lengths: Tensor, uniforms: Tensor) -> Drafts:
        text, limit = sequences.only_text(), int(lengths[0])
        length = text.shape[1]
        num_accepted = 0 if self.length is None else length - self.length - 1
        self.length = length
        if hasattr(self.generator, "num_assistant_tokens"):  # the others draft a fixed number
            self.generator.num_assistant_tokens = limit
        devices = [text.device] if text.device.type == "cuda" else []
        # Generators draw from torch's global generator; their seed comes from where all our random numbers come from
        with torch.random.fork_rng(devices):
            torch.manual_seed(int(uniforms[0, 0] * SEED_BITS))
            candidates, logits = self.generator.get_candidates(
                text,
                model_kwargs=extended(self.model.inputs, length, is_encoder_decoder=False),
                model_outputs=self.model.outputs,
                is_first_iteration=False,
                n_last_matches=num_accepted,
            )
        tokens = candidates[:, length:][:, :limit].to(text.device)
        sequences.write(0, tokens)
        laws = logits[:, :limit].to(text.device) if self.is_sampled else None
        return Drafts(tokens, laws, tokens.new_full((1,), tokens.shape[1]))

    def keep(self, index: Tensor) -> None:
        """The one row stays until the call ends."""


def num_fixed_drafts(target: Host, draft: Host | None) -> int | None:
    """How many tokens a round such a generator drafts, if that is fixed."""
    if draft is None:
        return getattr(target.config, "num_mtp_layers", None)
    block_size = getattr(draft.inner.config, "block_size", None)
    return None if block_size is None else block_size - 1
