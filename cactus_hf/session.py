"""One `generate()` call: prefills target and draft, decodes, and returns transformers' output."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import generation as hf

from . import counters, states
from .cached_model import CachedModel
from .config import SpeculationOptions, rule_for_rows
from .decoding import Decoder
from .draft_length import LengthSchedule
from .logits import BlockProcessor
from .outputs import SpeculativeEncoderDecoderOutput, SpeculativeOutput, TokenRows
from .parameters import select_rows
from .prefill import MOST_COLUMNS, Prompts, prefilled
from .ragged_cache import UnequalRowsError
from .randomness import NoUniforms, make_uniforms
from .ranks import Ranks, make_ranks
from .sequences import Sequences
from .sources import Sources
from .stopping import Stopping
from .validation import (
    check_cache,
    check_context,
    check_decoder_padding,
    check_inputs,
    check_measurable,
    check_processors,
    check_ranks,
    left_padding,
)


if TYPE_CHECKING:
    from .host import Host


def speculate(
    target: Host,
    draft: Host | None,
    options: SpeculationOptions,
    input_ids: Tensor,
    processors: hf.LogitsProcessorList,
    criteria: hf.StoppingCriteriaList,
    config: hf.GenerationConfig,
    *,
    streamer: Any = None,
    synced_gpus: bool = False,
    inputs_tensor: Tensor | None = None,
    tokenizer: Any = None,
    assistant_tokenizer: Any = None,
    **inputs: Any,
) -> SpeculativeOutput | SpeculativeEncoderDecoderOutput | Tensor:
    """Decode the prompts `input_ids` [R, P].

    The arguments are those of transformers' decoding methods, as `generate()` prepared them.
    """
    input_ids = input_ids.long()
    num_rows, prompt_length = input_ids.shape
    num_sequences = config.num_return_sequences or 1
    do_sample = bool(config.do_sample)

    check_inputs(target, inputs, input_ids, streamer)
    check_cache(inputs.get(target.cache_name), num_rows, prompt_length)
    check_processors(processors)
    if options.speculation_kl:
        check_measurable(options.rule)
    mask = inputs.get("decoder_attention_mask" if target.is_encoder_decoder else "attention_mask")
    padding = left_padding(mask, num_rows)
    check_decoder_padding(target, padding)
    is_returned = bool(config.return_dict_in_generate)
    has_scores = is_returned and bool(config.output_scores)
    ranks = make_ranks(target, draft, synced_gpus, input_ids.device)
    stopping = Stopping(criteria, input_ids, target.vocab_size if has_scores else None, ranks)
    max_length = min(config.max_length, stopping.max_length or config.max_length, MOST_COLUMNS)
    sources = Sources(target, draft, options, config, (tokenizer, assistant_tokenizer))
    check_context(target, prompt_length - padding, max_length - int(padding.min()))
    check_ranks(ranks, sources.hosts.values(), sources.needs_generator, config)
    rule = rule_for_rows(options.rule, num_rows, num_sequences, input_ids.device)
    uniforms = make_uniforms(options.generator, num_rows, num_sequences, input_ids.device)
    length = sources.length
    drafting = (draft is None, length.num_tokens, length.schedule == "constant", length.confidence_threshold > 0)
    others = (max_length, bool(stopping.others), do_sample, options.speculation_kl)
    ranks.check_alike(input_ids, padding, drafting + others)

    sequences = Sequences(input_ids, padding, max_length, target.pad_token_id(config))
    block_processor = BlockProcessor.of_call(processors, input_ids, target.vocab_size)
    has_users_cache = target.is_users(inputs.get(target.cache_name))
    is_cache_returned = is_returned or has_users_cache
    for name in ("output_attentions", "output_hidden_states"):  # of the finished text, see `states`
        inputs.pop(name, None)
    if not has_users_cache:  # the one that `generate()` made may not fit
        inputs.pop(target.cache_name, None)
    if inputs_tensor is not None and len(inputs_tensor) < num_rows:  # the one thing that `generate()` does not repeat
        inputs_tensor = inputs_tensor.repeat_interleave(num_rows // len(inputs_tensor), dim=0)
    prompts = Prompts(input_ids, padding, inputs, inputs_tensor)
    recorder = counters.Recorder(num_rows, options.speculation_kl)
    scores = TokenRows(num_rows) if has_scores else None
    raw_logits = TokenRows(num_rows) if is_returned and config.output_logits else None
    schedule = LengthSchedule(sources.length, num_rows)

    def start(prompts: Prompts, rows: Tensor) -> Decoder:
        """Read the prompts of `rows`, to be decoded together."""
        sequences.activate(rows)
        sources.prepare(prompts, block_processor.for_generators())
        first_logits, target_model = prefilled(
            target, prompts, config, is_cache_returned, sources.watched, ranks=ranks
        )
        return Decoder(
            first_logits,
            target_model,
            sources.make(prompts, sequences, target_model, block_processor, first_logits.shape[-1], ranks),
            sequences,
            select_rows(rule, rows) if do_sample else None,
            block_processor,
            schedule,
            stopping,
            uniforms if do_sample else NoUniforms(),
            recorder,
            ranks,
            streamer,
            scores,
            raw_logits,
        )

    target_model = _decode_all(start, prompts, sources, ranks)
    block_processor.finish(sequences)
    cache = None
    if is_cache_returned and target_model is not None:
        cache = target_model.returned_cache(*sequences.behind_ends())
    if streamer is not None:
        streamer.end()

    stats = recorder.stats()
    counters.publish(stats)
    text = sequences.output()
    if not is_returned:
        return text
    kind = SpeculativeEncoderDecoderOutput if target.is_encoder_decoder else SpeculativeOutput
    output = kind(
        sequences=text,
        scores=scores and scores.by_token(stats.emitted),
        logits=raw_logits and raw_logits.by_token(stats.emitted),
        **states.collect(target, text, prompt_length, config, inputs),
        **{target.cache_name: cache},
    )
    output.speculation = stats
    return output


def _decode_all(
    start: Callable[[Prompts, Tensor], Decoder], prompts: Prompts, sources: Sources, ranks: Ranks
) -> CachedModel | None:
    """Decode all rows, together where the models can; the target holding them, `None` if it held one after another."""
    num_rows = len(prompts.input_ids)
    if sources.are_ragged:
        try:
            decoder = start(prompts, torch.arange(num_rows))
        except UnequalRowsError:
            pass  # it could not be told before the prompts were read
        else:
            return decoder.run()
    if num_rows > 1:
        prompts.check_separable()
        _warn_row_by_row(sources)
    num_missing = ranks.most(num_rows) - num_rows  # rows that another process has more
    for row in range(num_rows):
        is_whole = num_rows == 1 and not sources.needs_generator
        target_model = start(prompts if is_whole else prompts.row(row), torch.tensor([row])).run()
    for _ in range(num_missing):
        again = prompts.row(row)
        again.inputs.pop(sources.target.cache_name, None)
        decoder = start(again, torch.tensor([row]))
        decoder.has_finished = True  # only its passes matter, to that process
        decoder.run()
    return target_model if num_rows == 1 else None


def _warn_row_by_row(sources: Sources) -> None:
    names = ", ".join(host.name for host in sources.hosts.values())
    warnings.warn(
        f"The rows of this batch are decoded one after another, as {names} with this attention implementation and "
        "source of drafts cannot hold rows that grow at different speeds. Such a batch is no faster than its rows.",
        stacklevel=2,
    )
