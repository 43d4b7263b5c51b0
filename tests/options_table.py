"""What becomes of every parameter of `GenerationConfig` and every argument of `generate()`: docs/options.md as a table.

tests/test_options.py runs each row. `python tests/options_table.py` writes the page anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CompileConfig,
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)

import tiny


PAGE = Path(__file__).parents[1] / "docs" / "options.md"
Call = dict[str, Any] | Callable[[tiny.Prompts], dict[str, Any]]  # options of a call; some depend on the prompts


@dataclass(frozen=True)
class Option:
    """
    Args:
        name (`str`): of the parameter or argument.
        status (`str`): a key of `STATUS`.
        note (`str`): what it does here, and its limits.
        equal (list of calls): those whose text and law are plain `generate()`'s.
        is_inert (`bool`): whether these change nothing in plain generation either.
        refused (list of calls, each with a pattern): those that are errors, and words of the error.
        tests (list of `str`): other tests of it, as `file::name`.
    """

    name: str
    status: str
    note: str
    equal: tuple[Call, ...] = ()
    is_inert: bool = False
    refused: tuple[tuple[Call, str], ...] = ()
    tests: tuple[str, ...] = ()


STATUS = {
    "equal": "as in plain `generate()`: the same greedy text, and the same law to sample from at each position",
    "honoured": "says what is done between the tokens; the text's law is what README.md says of the rule",
    "refused": "an error before the first forward pass (some values of other options are, too: see the notes)",
}

SYNTH_ID = SynthIDTextWatermarkingConfig(ngram_len=3, keys=[1, 5, 9, 11])
BYTES, WORDS = tiny.byte_tokenizer(), tiny.word_tokenizer()
ENDS = [76, 36, 44, 96, 23]  # ids that the tests' texts run into
HUB = "another decoding method, which transformers fetches from the Hub"
BEAMS = "of beam search only, without effect here as in plain generation"
DRAFTS = "rows that stop drafting are verified with fewer drafts"


def equal(name: str, note: str, *calls: Call, **rest: Any) -> Option:
    return Option(name, "equal", note, equal=calls, **rest)


def inert(name: str, note: str, *calls: Call, **rest: Any) -> Option:
    return Option(name, "equal", note, equal=calls, is_inert=True, **rest)


def honoured(name: str, note: str, *tests: str, **rest: Any) -> Option:
    return Option(name, "honoured", note, tests=tests, **rest)


def refused(name: str, note: str, *calls: tuple[Call, str], **rest: Any) -> Option:
    return Option(name, "refused", note, refused=calls, **rest)


def last(values: torch.Tensor, value: int) -> torch.Tensor:
    """`values` [B, T] with another last column."""
    return torch.cat([values[:, :-1], torch.full_like(values[:, -1:], value)], dim=1)


def shifted(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores.roll(ids.shape[1] % 3, -1)


CONFIG = {
    "Length and end": (
        equal("max_length", "", {"max_length": 25, "max_new_tokens": None}),
        equal("max_new_tokens", "", {"max_new_tokens": 7}),
        equal("min_length", "", {"min_length": 20, "eos_token_id": ENDS}),
        equal("min_new_tokens", "", {"min_new_tokens": 8, "eos_token_id": ENDS}),
        equal("eos_token_id", "one or several; found inside a block of drafts", {"eos_token_id": ENDS}, {"eos_token_id": 68}),
        equal("pad_token_id", "behind rows that ended", {"pad_token_id": 3, "eos_token_id": ENDS}),
        equal("stop_strings", "found inside a block; the row is padded behind it", {"stop_strings": [BYTES.decode([i]) for i in ENDS], "tokenizer": BYTES, "eos_token_id": tiny.EOS}),
        equal("max_time", "asked about every new token", {"max_time": 1e-9}),
        equal("bos_token_id", "the prompt of a call without one", {"input_ids": None, "attention_mask": None, "bos_token_id": 5}),
    ),
    "Sampling": (
        honoured("do_sample", "sampling, by the rule; greedy texts are plain generation's", "test_decoding.py::test_delta_0_samples_the_target", "test_decoding.py::test_does_not_depend_on_delta"),
        equal("temperature", "of target and draft", {"temperature": 0.6}),
        equal("top_k", "50 if not set, as in plain generation", {"top_k": 5}),
        equal("top_p", "", {"top_p": 0.6}),
        equal("min_p", "", {"min_p": 0.2}),
        equal("top_h", "", {"top_h": 0.5}),
        equal("typical_p", "", {"typical_p": 0.5}),
        equal("epsilon_cutoff", "", {"epsilon_cutoff": 0.1}),
        equal("eta_cutoff", "", {"eta_cutoff": 0.2}),
        equal("renormalize_logits", "", {"renormalize_logits": True}),
    ),
    "Logits": (
        equal("repetition_penalty", "", {"repetition_penalty": 1.3}),
        equal("encoder_repetition_penalty", "", {"encoder_repetition_penalty": 1.5}),
        equal("no_repeat_ngram_size", "", {"no_repeat_ngram_size": 2, "repetition_penalty": 0.7}),
        equal("encoder_no_repeat_ngram_size", "", {"encoder_no_repeat_ngram_size": 1}),
        equal("bad_words_ids", "", {"bad_words_ids": [[71], [54], [40, 64]]}),
        equal("suppress_tokens", "", {"suppress_tokens": [71, 54, 10]}),
        equal("begin_suppress_tokens", "", {"begin_suppress_tokens": list(range(50))}),
        equal("sequence_bias", "", {"sequence_bias": [[[5], 5.0], [[40, 64], -5.0]]}),
        equal("forced_bos_token_id", "", {"input_ids": None, "attention_mask": None, "forced_bos_token_id": 9}),
        equal("forced_eos_token_id", "", {"forced_eos_token_id": 3}),
        equal("exponential_decay_length_penalty", "", {"exponential_decay_length_penalty": (3, 1.5), "eos_token_id": 7}),
        inert("remove_invalid_values", "", {"remove_invalid_values": True}),
        equal("token_healing", "of the prompts, by transformers", lambda prompts: {"token_healing": True, "tokenizer": WORDS, "input_ids": last(prompts.input_ids, 5)}),
        equal("watermarking_config", "`SynthIDTextWatermarkingConfig` is refused", {"watermarking_config": WatermarkingConfig(bias=5.0)}, refused=(({"watermarking_config": SYNTH_ID}, "SynthID"),)),
        refused("guidance_scale", "other than 1", ({"guidance_scale": 1.5}, "guidance_scale.*leave")),
    ),
    "Cache": (
        inert("use_cache", "`False` is refused, unless a checkpoint says so: then it is overruled", {"use_cache": True}, refused=(({"use_cache": False}, "use_cache=False"),), tests=("test_generation.py::test_a_checkpoint_that_turns_its_cache_off",)),
        inert("cache_implementation", '`"dynamic"`; static, offloaded, quantized and `"paged"` ones are refused', {"cache_implementation": "dynamic"}, refused=tuple(({"cache_implementation": name}, f"'{name}'.*DynamicCache") for name in ("static", "offloaded", "offloaded_static", "quantized", "sliding_window"))),
        inert("cache_config", "of the caches that are refused", {"cache_config": {"nbits": 4}}),
        inert("max_cache_len", "of the caches that are refused", {"max_cache_len": 100}),
        inert("prefill_chunk_size", "the prompts are read in such chunks, by target and draft", {"prefill_chunk_size": 4}, tests=("test_options.py::test_prompts_are_read_in_chunks",)),
        inert("low_memory", "of contrastive search only", {"low_memory": True}),
        inert("compile_config", "used with static caches only, so not here", {"compile_config": CompileConfig()}),
        inert("disable_compile", "nothing is compiled here", {"disable_compile": True}),
        inert("continuous_batching_config", "of `generate_batch` only", {"continuous_batching_config": None}),
    ),
    "Drafts": (
        honoured("num_assistant_tokens", "a round; 5 if neither the call nor target's or draft's config say", "test_generation.py::test_order", "test_decoding.py::test_any_draft_length", equal=({"num_assistant_tokens": 2},), is_inert=True),
        honoured("num_assistant_tokens_schedule", "row by row, without state between calls", "test_draft_length.py::test_heuristic_goes_by_row", "test_decoding.py::test_any_schedule", equal=({"num_assistant_tokens_schedule": "heuristic"},), is_inert=True),
        honoured("assistant_confidence_threshold", "0 if not set; the unsure token itself is kept", "test_decoding.py::test_confidence_threshold_leaves_the_law_as_it_is", "test_drafting.py::test_an_unsure_token_is_kept_and_ends_the_row", equal=({"assistant_confidence_threshold": 0.4},), is_inert=True),
        honoured("prompt_lookup_num_tokens", "drafts from the text instead of a draft model", "test_prompt_lookup.py::test_greedy_text_is_plain"),
        honoured("max_matching_ngram_size", "", "test_prompt_lookup.py::test_equals_the_definition", equal=({"max_matching_ngram_size": 3},), is_inert=True),
        refused("assistant_ensemble_weight", "with a rule: `Mixture` is that rule", ({"assistant_ensemble_weight": 0.5}, "assistant_ensemble_weight.*Mixture")),
        refused("assistant_early_exit", "", ({"assistant_early_exit": 1}, "assistant_early_exit")),
        refused("use_mtp", "", ({"use_mtp": True}, "use_mtp")),
        refused("speculation_type", "", ({"speculation_type": "dflash"}, "speculation_type")),
        inert("assistant_lookbehind", "for drafts with another tokenizer", {"assistant_lookbehind": 3}),
        inert("target_lookbehind", "for drafts with another tokenizer", {"target_lookbehind": 3}),
        refused("is_assistant", "transformers' own mark of a draft", ({"is_assistant": True}, "is_assistant")),
    ),
    "Output": (
        honoured("num_return_sequences", "independent rows; `cactus_delta` may have a value a prompt or a returned row", "test_decoding.py::test_num_return_sequences", "test_decoding.py::test_delta_of_each_prompt_holds_for_all_its_returned_rows"),
        inert("return_dict_in_generate", "adds `.speculation`", {"return_dict_in_generate": True}, tests=("test_session.py::test_kinds_cover_the_text", "test_session.py::test_equals_that_of_plain_generation")),
        inert("output_scores", "the target's processed logits, one entry a token; zeros behind a row's end", {"output_scores": True, "return_dict_in_generate": True}, tests=("test_session.py::test_scores_are_the_targets_processed_logits", "test_session.py::test_scores_of_finished_rows_are_zero")),
        inert("output_logits", "the target's raw logits, likewise", {"output_logits": True, "return_dict_in_generate": True}, tests=("test_session.py::test_scores_are_the_targets_processed_logits",)),
        refused("output_attentions", "", ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions")),
        refused("output_hidden_states", "", ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states")),
    ),
    "Other decoding methods": (
        refused("num_beams", "more than 1", ({"num_beams": 2}, "num_beams=2")),
        inert("early_stopping", BEAMS, {"early_stopping": True}),
        inert("length_penalty", BEAMS, {"length_penalty": 2.0}),
        inert("diversity_penalty", BEAMS, {"diversity_penalty": 0.5}),
        inert("num_beam_groups", BEAMS, {"num_beam_groups": 2}),
        refused("penalty_alpha", f"contrastive search, with `top_k` and without sampling: {HUB}", ({"penalty_alpha": 0.5, "top_k": 4, "trust_remote_code": True}, "penalty_alpha.*contrastive")),
        refused("dola_layers", HUB, ({"dola_layers": "low"}, "dola_layers"), ({"dola_layers": "low", "trust_remote_code": True}, "dola_layers")),
        refused("constraints", HUB, ({"constraints": [1], "trust_remote_code": True}, "constraints.*constrained beam search")),
        refused("force_words_ids", HUB, ({"force_words_ids": [[5]], "num_beams": 2, "trust_remote_code": True}, "force_words_ids.*constrained beam search")),
    ),
    "Of no effect": (
        inert("decoder_start_token_id", "of encoder-decoder models only", {"decoder_start_token_id": 4}),
        inert("transformers_version", "a record", {"transformers_version": "5.17.0"}),
    ),
}  # fmt: skip

ARGUMENTS = {
    "Arguments of `generate()`": (
        equal("inputs", "token ids; `input_ids` is the same", lambda prompts: {"inputs": prompts.input_ids.flip(0), "input_ids": None, "attention_mask": prompts.attention_mask.flip(0)}),
        equal("generation_config", "`cactus_delta` may stand in it", {"generation_config": GenerationConfig(repetition_penalty=1.3)}, tests=("test_generation.py::test_in_a_generation_config_passed_in",)),
        equal("logits_processor", "context-free in effect, without memory", {"logits_processor": LogitsProcessorList([shifted])}),
        equal("stopping_criteria", "asked about each committed prefix, without memory; `scores` is `None`", {"stopping_criteria": StoppingCriteriaList([lambda ids, scores, **_: ids.shape[1] >= 24])}, tests=("test_session.py::test_criteria_of_the_user_end_rows_inside_a_block",)),
        equal("prefix_allowed_tokens_fn", "", {"prefix_allowed_tokens_fn": lambda row, ids: list(range(10 * row + len(ids) % 2, 10 * row + 30))}),
        honoured("assistant_model", "the draft: a model of the target's tokenizer, on its device", "test_decoding.py::test_ragged_batch_equals_plain_rows", "test_validation.py::test_another_tokenizer"),
        honoured("streamer", "batch 1; 1-D blocks as soon as they are committed", "test_session.py::test_tokens_come_as_they_are_committed", "test_session.py::test_text_streamers", "test_validation.py::test_bad_options"),
        inert("tokenizer", "for `stop_strings` and `token_healing`", {"tokenizer": BYTES}),
        inert("assistant_tokenizer", "must be the target's; other tokenizers are refused", {"tokenizer": BYTES, "assistant_tokenizer": BYTES}, tests=("test_validation.py::test_another_tokenizer_of_the_same_size",)),
        inert("negative_prompt_ids", "for `guidance_scale`", {"negative_prompt_ids": torch.tensor([[5]])}),
        inert("negative_prompt_attention_mask", "for `guidance_scale`", {"negative_prompt_attention_mask": torch.tensor([[1]])}),
        refused("synced_gpus", "", ({"synced_gpus": True}, "synced_gpus")),
        refused("custom_generate", "a function. (A folder or a Hub name runs its own code, which gets all arguments)", ({"custom_generate": lambda model, input_ids, **_: input_ids}, "custom_generate")),
        inert("trust_remote_code", "for `custom_generate`", {"trust_remote_code": True}),
    ),
    "Inputs of the model": (
        equal("attention_mask", "integers, booleans or floats; left padding only; made from `pad_token_id` if not given", lambda prompts: {"attention_mask": prompts.attention_mask.bool(), "repetition_penalty": 1.3}, lambda prompts: {"attention_mask": None, "repetition_penalty": 1.3}, refused=((lambda prompts: {"attention_mask": last(prompts.attention_mask, 0)}, "padding_side"),)),
        inert("position_ids", "must count from 0, as those that are made", lambda prompts: {"position_ids": (prompts.attention_mask.cumsum(1) - 1).clamp_min(0)}, refused=((lambda prompts: {"position_ids": torch.arange(17).expand(len(prompts.input_ids), -1) + 3}, "position_ids"),)),
        refused("inputs_embeds", "drafts need token ids", (lambda prompts: {"input_ids": None, "inputs_embeds": torch.ones(*prompts.input_ids.shape, 32)}, "inputs_embeds.*only token ids"), (lambda prompts: {"inputs_embeds": torch.ones(*prompts.input_ids.shape, 32)}, "inputs_embeds.*only token ids")),
        honoured("cache", "`past_key_values` in transformers 5.17; a `DynamicCache` from an earlier turn or a prefilled prompt, along with the whole text's ids; it is filled", "test_session.py::test_serves_the_next_turn", "test_options.py::test_a_prefilled_prompt", "test_options.py::test_caches_that_do_not_fit"),
    ),
}  # fmt: skip
OWN = {
    "Keywords of this package": (
        honoured("cactus_delta", "nats, one number or one a row; also in a `generation_config`", "test_decoding.py::test_cactus_samples_the_law_of_its_rounds", "test_decoding.py::test_delta_of_each_row", "test_generation.py::test_in_the_models_generation_config", "test_validation.py::test_bad_options"),
        honoured("acceptance_rule", "instead of `cactus_delta`", "test_decoding.py::test_other_rules_sample_the_law_of_their_rounds", "test_validation.py::test_bad_options"),
        honoured("speculation_kl", "measures the emitted law", "test_decoding.py::test_acceptance_and_divergence_grow_with_delta", "test_validation.py::test_bad_options"),
        honoured("generator", "a `torch.Generator`, or a seed a row", "test_decoding.py::test_seeded_rows_sample_the_target", "test_decoding.py::test_a_seeded_row_does_not_depend_on_its_neighbours", "test_validation.py::test_bad_options"),
    ),
}  # fmt: skip
SECTIONS = CONFIG | ARGUMENTS | OWN
OPTIONS = tuple(option for options in SECTIONS.values() for option in options)

HEAD = """# Options

What becomes of every parameter of transformers' `GenerationConfig` and every argument of `generate()` in a call with
`cactus_delta` or `acceptance_rule`. A call without them is transformers' own.

"""


def page() -> str:
    """The text of docs/options.md."""
    parts = [HEAD, *(f"* **{status}**: {meaning}\n" for status, meaning in STATUS.items())]
    for title, options in SECTIONS.items():
        rows = [f"| `{option.name}` | {option.status} | {option.note} |\n" for option in options]
        parts += [f"\n## {title}\n\n", "| option | | |\n|---|---|---|\n", *rows]
    return "".join(parts)


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
