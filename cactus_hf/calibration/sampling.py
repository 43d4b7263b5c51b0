"""Lossless texts behind prompts, and the laws of both models along them as `generate()` would have them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import support
from ..bench.prompts import Batch, batches
from ..generation import SpeculativeMixin, disable, enable
from ..host import Host, split_by_row
from ..logits import BlockProcessor
from ..reading import SharedText
from ..sequences import Sequences
from ..sources import text_inputs
from ..wrappers import unwrapped


# Options of `generate()` that are set here
OWN_OPTIONS = (
    "assistant_model",
    "cactus_delta",
    "cactus_kl",
    "cactus_kl_total",
    "acceptance_rule",
    "speculation_kl",
    "generator",
    "inputs",
    "input_ids",
    "attention_mask",
    "return_dict_in_generate",
    "custom_generate",
    "num_return_sequences",
    "num_beams",
    "max_length",
    "streamer",
)


class Text(NamedTuple):
    """A continuation, and the logits behind each of its prefixes after logits processors."""

    tokens: Tensor  # [N]
    target_logits: Tensor  # [N, V]
    draft_logits: Tensor  # [N, V]


class Texts:
    """
    Args:
        target, draft (`PreTrainedModel`): the pair, the target enabled.
        options (`dict`): of `generate()`.
    """

    def __init__(self, target: Any, draft: Any, options: dict[str, Any]):
        self.target, self.draft, self.options = target, draft, options
        self.hosts = Host(target), Host(draft)
        self.pad_token_id = _pad_token_id(target, options)

    def write(self, prompts: Sequence[list[int]], seeds: Sequence[int], delta: float = 0.0, **options: Any) -> Any:
        """The output of a call, prompts decoded together; without a `delta` the texts are the target's own."""
        batch = self._batch(prompts)
        return self.target.generate(
            **batch._asdict(),
            **self.options,
            **options,
            assistant_model=self.draft,
            cactus_delta=delta,
            generator=list(seeds),
            return_dict_in_generate=True,
        )

    @torch.no_grad()
    def read(self, prompts: Sequence[list[int]], seeds: Sequence[int]) -> Iterator[Text]:
        """Writes lossless texts and reads them, a batch in one pass of each model."""
        output = self.write(prompts, seeds)
        lengths = output.speculation.emitted.tolist()
        batch = self._batch(prompts)
        num_prompt = batch.input_ids.shape[1]
        padding = num_prompt - batch.attention_mask.sum(1).cpu()
        processors = self._processors(batch)
        logits = [self._logits(host, output.sequences, padding, max(lengths)) for host in self.hosts]
        target_size, draft_size = (each.shape[-1] for each in logits)
        draft_text = SharedText((target_size, draft_size), batch.input_ids.device)
        blocks = BlockProcessor.of_call(processors, batch.input_ids, target_size)
        for row, length in enumerate(lengths):
            sequences = Sequences(batch.input_ids, padding, num_prompt + length, self.pad_token_id)
            sequences.activate(torch.tensor([row]))
            tokens = output.sequences[row : row + 1, num_prompt : num_prompt + length]
            sequences.write(0, tokens)
            target, draft = (each[row : row + 1, :length] for each in logits)
            # As in a round the draft comes first, in which processors that remember are not moved on
            draft = blocks.for_draft()(draft_text.over_target(draft).to(tokens.device), sequences)
            yield Text(tokens[0], blocks(target, sequences)[0], draft[0])

    def _batch(self, prompts: Sequence[list[int]]) -> Batch:
        return batches(prompts, len(prompts), self.pad_token_id, self.hosts[0].device)[0]

    def _processors(self, batch: Batch) -> list[Any]:
        """The logits processors that `generate()` makes of the options, for these prompts."""
        found: list[Any] = []

        def capture(model: Any, input_ids: Tensor, logits_processor: Any, **rest: Any) -> Tensor:
            found.extend(logits_processor)
            return input_ids

        self.target.generate(**batch._asdict(), **self.options, custom_generate=capture)
        return [split_by_row(processor, len(batch.input_ids)) for processor in found]

    def _logits(self, host: Host, text: Tensor, padding: Tensor, num_last: int) -> Tensor:
        """[R, num_last, V]: what the model says of the last columns of `text` [R, columns]."""
        ids = text[:, :-1].to(host.device)
        if host is self.hosts[1]:
            ids = SharedText((self.hosts[0].vocab_size, host.vocab_size), host.device).read_drafts(ids)
        inputs: dict[str, Any] = dict(text_inputs(host, padding, ids))
        if host.takes("logits_to_keep"):
            inputs["logits_to_keep"] = num_last
        return host.model(input_ids=ids, **inputs, use_cache=False).logits[:, -num_last:]


def _pad_token_id(target: Any, options: dict[str, Any]) -> int:
    for source in (options, vars(target.generation_config)):
        for name in ("pad_token_id", "eos_token_id"):
            value = source.get(name)
            if value is not None:
                return int(value[0] if isinstance(value, list) else value)
    return 0


@contextmanager
def enabled(model: Any) -> Iterator[Any]:
    """Enables the model for a while, if it is not."""
    was_enabled = isinstance(unwrapped(model), SpeculativeMixin)
    try:
        yield enable(model)
    finally:
        if not was_enabled:
            disable(model)


def check_pair(target: Any, draft: Any, prompts: Sequence[list[int]], max_new_tokens: int) -> None:
    """Raises `ValueError` for models that cannot read the `prompts` with their continuations."""
    longest = max(map(len, prompts)) + max_new_tokens
    vocab_size = Host(target).vocab_size
    for number, ids in enumerate(prompts):
        if min(ids) < 0 or max(ids) >= vocab_size:
            raise ValueError(
                f"Prompt {number} has the token id {min(ids) if min(ids) < 0 else max(ids)}, and the target knows ids "
                f"from 0 to {vocab_size - 1}: are the ids of another tokenizer?"
            )
    for role, host in (("target", Host(target)), ("draft", Host(draft))):
        if host.is_encoder_decoder:
            raise ValueError(f"The {role}, {host.name}, has an encoder: only decoder-only models are calibrated.")
        context = support.draft_context(host.config)
        if context is not None and longest > context:
            raise ValueError(
                f"The longest prompt and its new tokens come to {longest} tokens, and the {role} holds {context}: "
                "give shorter prompts, or a smaller `max_new_tokens`."
            )


def checked_options(options: dict[str, Any], target: Any) -> dict[str, Any]:
    """Options of `generate()` with sampling on. Raises `ValueError` for those that have another meaning here."""
    given = [f"`{name}`" for name in OWN_OPTIONS if options.get(name) is not None]
    if given:
        raise ValueError(f"`calibrate` sets {', '.join(given)} itself: leave it out.")
    if options.get("do_sample") is False:
        raise ValueError("Greedy decoding is the same at every delta, so there is nothing to calibrate: sample.")
    return copy.copy(options) | {"do_sample": True}
