"""What drafts in a call, made from its arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import generation as hf

from .config import LENGTH_KEYWORDS, SpeculationOptions, given
from .draft_length import DraftLength
from .drafting import DraftModel, DraftSource, known
from .logits import BlockProcessor
from .prefill import prefilled
from .prompt_lookup import PromptLookup


if TYPE_CHECKING:
    from .generation import Host


def draft_length(draft: Host | None, options: SpeculationOptions, config: hf.GenerationConfig) -> DraftLength:
    if draft is None:
        return DraftLength(config.prompt_lookup_num_tokens)
    return options.draft_length(given(draft.inner.generation_config, list(LENGTH_KEYWORDS)))


def draft_source(
    draft: Host | None,
    vocab_size: int,
    length: DraftLength,
    processors: BlockProcessor,
    input_ids: Tensor,
    padding: Tensor,
    config: hf.GenerationConfig,
    inputs: dict[str, Any],
) -> DraftSource:
    """What drafts: the draft model, holding the prompts, or the text itself."""
    if draft is None:
        return PromptLookup(config.max_matching_ngram_size or 2, vocab_size)
    names = ("attention_mask", "position_ids") if draft.takes("position_ids") else ("attention_mask",)
    own_inputs = {name: inputs[name] for name in names if inputs.get(name) is not None}
    _, model = prefilled(draft, known(input_ids, draft.vocab_size), padding, config, own_inputs)
    return DraftModel(
        model,
        processors.for_draft(),
        (vocab_size, draft.vocab_size),
        bool(config.do_sample),
        length.confidence_threshold,
    )
