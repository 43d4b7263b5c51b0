"""One `generate()` call: prefills target and draft, decodes, and returns transformers' output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import generation as hf

from . import counters
from .config import SpeculationOptions, rule_for_rows
from .decoding import Decoder
from .draft_length import LengthSchedule
from .logits import BlockProcessor
from .outputs import SpeculativeOutput, TokenRows
from .prefill import MOST_COLUMNS, prefilled
from .randomness import NoUniforms, make_uniforms
from .sequences import Sequences
from .sources import draft_length, draft_source
from .stopping import Stopping
from .validation import (
    check_batch,
    check_cache,
    check_inputs,
    check_measurable,
    check_positions,
    check_processors,
    left_padding,
)


if TYPE_CHECKING:
    from .generation import Host


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
    **inputs: Any,
) -> SpeculativeOutput | Tensor:
    """Decode the prompts `input_ids` [R, P].

    The arguments are those of transformers' decoding methods, as `generate()` prepared them.
    """
    input_ids = input_ids.long()
    num_rows, prompt_length = input_ids.shape
    num_sequences = config.num_return_sequences or 1
    do_sample = bool(config.do_sample)

    hosts = {"target": target} | ({} if draft is None else {"draft": draft})
    check_inputs(inputs, input_ids, streamer, synced_gpus)
    check_cache(inputs.get(target.cache_name), config)
    check_processors(processors)
    if options.speculation_kl:
        check_measurable(options.rule)
    padding = left_padding(inputs.get("attention_mask"), num_rows)
    check_positions(inputs.get("position_ids"), padding, prompt_length)
    stopping = Stopping(criteria, input_ids.device)
    max_length = min(config.max_length, stopping.max_length or config.max_length, MOST_COLUMNS)
    check_batch(hosts, prompt_length - padding, max_length - int(padding.min()))
    rule = rule_for_rows(options.rule, num_rows, num_sequences, input_ids.device)
    uniforms = make_uniforms(options.generator, num_rows, num_sequences, input_ids.device)
    length = draft_length(draft, options, config)

    sequences = Sequences(input_ids, padding, max_length, pad_token_id(config))
    block_processor = BlockProcessor(processors)
    is_returned = bool(config.return_dict_in_generate)
    is_cache_returned = is_returned or target.is_users(inputs.get(target.cache_name))
    recorder = counters.Recorder(num_rows, options.speculation_kl)

    first_logits, target_model = prefilled(target, input_ids, padding, config, inputs, is_cache_returned)
    source = draft_source(draft, first_logits.shape[-1], length, block_processor, input_ids, padding, config, inputs)
    decoder = Decoder(
        target_model,
        source,
        sequences,
        rule if do_sample else None,
        block_processor,
        LengthSchedule(length, num_rows),
        stopping,
        uniforms if do_sample else NoUniforms(),
        recorder,
        streamer,
        TokenRows(num_rows) if is_returned and config.output_scores else None,
        TokenRows(num_rows) if is_returned and config.output_logits else None,
    )
    decoder.run(first_logits)
    if streamer is not None:
        streamer.end()

    stats = recorder.stats()
    counters.publish(stats)
    cache = target_model.returned_cache(int(sequences.length.max()) - 1) if is_cache_returned else None
    if not is_returned:
        return sequences.output()
    return SpeculativeOutput(
        sequences=sequences.output(),
        scores=decoder.scores and decoder.scores.by_token(),
        logits=decoder.raw_logits and decoder.raw_logits.by_token(),
        speculation=stats,
        **{target.cache_name: cache},
    )


def pad_token_id(config: hf.GenerationConfig) -> int:
    """What fills a row behind its end. `generate()` has set it wherever rows can end early."""
    return 0 if config.pad_token_id is None else int(config.pad_token_id)
