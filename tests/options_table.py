"""The table of options, a row for each parameter and argument; tests/test_options.py runs it."""

from __future__ import annotations

from options_arguments import ARGUMENTS, AROUND, BYTES, INPUTS, OWN, last
from options_page import equal, honoured, inert, refused
from transformers import CompileConfig, SynthIDTextWatermarkingConfig, WatermarkingConfig

import tiny


SYNTH_ID = SynthIDTextWatermarkingConfig(ngram_len=3, keys=[1, 5, 9, 11])
ENDS = [76, 36, 44, 96, 23]  # ids that the tests' texts run into
WITH_ENDS = {"eos_token_id": ENDS}
NO_PROMPT = {"input_ids": None, "attention_mask": None}
FROM_HUB = {"trust_remote_code": True}
RETURNED = {"return_dict_in_generate": True}
HUB = "another decoding method, which transformers fetches from the Hub"
BEAMS = "of beam search only; of no effect, as in plain generation"


LENGTH = (
    equal("max_length", "", 25, beside={"max_new_tokens": None}),
    equal("max_new_tokens", "", 7),
    equal("min_length", "", 20, beside=WITH_ENDS),
    equal("min_new_tokens", "", 8, beside=WITH_ENDS),
    equal("eos_token_id", "one or several; found inside a block of drafts", ENDS, 68),
    equal(
        "pad_token_id", "behind rows that ended; the first end of sequence if it is `None`", 3, None, beside=WITH_ENDS
    ),
    equal(
        "stop_strings",
        "found inside a block; the row is padded behind it",
        [BYTES.decode([token]) for token in ENDS],
        beside={"tokenizer": BYTES, "eos_token_id": tiny.EOS},
    ),
    equal("max_time", "asked about every new token", 1e-9),
    equal("bos_token_id", "the prompt of a call without one", 5, beside=NO_PROMPT),
)
SAMPLING = (
    honoured(
        "do_sample",
        "sampling is by the rule; without it texts are plain greedy decoding's",
        tests=("test_decoding.py::test_delta_0_samples_the_target", "test_decoding.py::test_does_not_depend_on_delta"),
    ),
    equal("temperature", "of target and draft, as all that follows", 0.6),
    equal("top_k", "50 if not set, as in plain generation", 5),
    equal("top_p", "", 0.6),
    equal("min_p", "", 0.2),
    equal("top_h", "", 0.5),
    equal("typical_p", "", 0.5),
    equal("epsilon_cutoff", "", 0.1),
    equal("eta_cutoff", "", 0.2),
    equal("renormalize_logits", "", True),
)
LOGITS = (
    equal("repetition_penalty", "", 1.3),
    equal("encoder_repetition_penalty", "", 1.5),
    equal("no_repeat_ngram_size", "", 2, beside={"repetition_penalty": 0.7}),
    equal("encoder_no_repeat_ngram_size", "", 1),
    equal("bad_words_ids", "", [[71], [54], [40, 64]]),
    equal("suppress_tokens", "", [71, 54, 10]),
    equal("begin_suppress_tokens", "", list(range(50))),
    equal("sequence_bias", "", [[[5], 5.0], [[40, 64], -5.0]]),
    equal("forced_bos_token_id", "", 9, beside=NO_PROMPT),
    equal("forced_eos_token_id", "", 3),
    equal("exponential_decay_length_penalty", "", (3, 1.5), beside={"eos_token_id": 7}),
    inert("remove_invalid_values", "", True),
    equal(
        "token_healing",
        "of the prompts, by transformers",
        calls=(
            lambda p: {"token_healing": True, "tokenizer": tiny.word_tokenizer(), "input_ids": last(p.input_ids, 5)},
        ),
    ),
    equal("watermarking_config", "", WatermarkingConfig(bias=5.0), SYNTH_ID),
    equal(
        "guidance_scale",
        "takes a pass of the target for every draft, which is slower than plain generation",
        1.5,
        tests=("test_remembering.py::test_transformers_own",),
    ),
)
CACHE = (
    inert(
        "use_cache",
        "`False` is refused in a call, and overruled where a checkpoint says so",
        True,
        refused=(({"use_cache": False}, "use_cache=False"),),
        tests=("test_generation.py::test_a_checkpoint_that_turns_its_cache_off",),
    ),
    inert(
        "cache_implementation",
        '`"dynamic"`, or `"static"` for passes of equal shapes; offloaded, quantized and paged ones are refused',
        "static",
        refused=tuple(
            ({"cache_implementation": name}, f"'{name}'.*DynamicCache")
            for name in ("offloaded", "offloaded_static", "quantized", "sliding_window")
        ),
        tests=("test_options.py::test_continuous_batching", "test_compiled.py::test_the_same_text"),
    ),
    inert("cache_config", "of caches that are refused", {"nbits": 4}),
    inert("max_cache_len", "of caches that are refused", 100),
    inert(
        "prefill_chunk_size",
        "target and draft read the prompts in such chunks",
        4,
        tests=("test_options.py::test_prompts_are_read_in_chunks",),
    ),
    inert("low_memory", "of contrastive search only", True),
    inert(
        "compile_config",
        "of static caches: how to compile the passes; on a CPU they are compiled only if it is given",
        CompileConfig(),
        tests=("test_compiled.py::test_a_few_graphs_serve_all_rounds_and_later_calls",),
    ),
    inert(
        "disable_compile",
        "a static cache without compilation",
        True,
        tests=("test_compiled.py::test_a_few_graphs_serve_all_rounds_and_later_calls",),
    ),
    inert("continuous_batching_config", "of `generate_batch` only, which refuses our keywords", None),
)
DRAFTS = (
    honoured(
        "num_assistant_tokens",
        "drafts a round; the call goes before the target's config, that before the draft's, that before our 5",
        2,
        tests=("test_generation.py::test_order", "test_decoding.py::test_any_draft_length"),
    ),
    honoured(
        "num_assistant_tokens_schedule",
        'without state between calls; `"auto"` goes by what is fastest, see [draft_length.md](draft_length.md)',
        "heuristic",
        "auto",
        tests=(
            "test_draft_length.py::test_heuristic_goes_by_row",
            "test_decoding.py::test_any_schedule",
            "test_auto_length.py::test_given_costs_come_close_to_the_best_fixed_length",
        ),
    ),
    honoured(
        "assistant_confidence_threshold",
        "0 if not set; the unsure token itself is kept",
        0.4,
        tests=(
            "test_decoding.py::test_confidence_threshold_leaves_the_law_as_it_is",
            "test_drafting.py::test_an_unsure_token_is_kept_and_ends_the_row",
        ),
    ),
    honoured(
        "prompt_lookup_num_tokens",
        "drafts from the text instead of a draft model",
        tests=("test_prompt_lookup.py::test_greedy_text_is_plain",),
    ),
    honoured(
        "max_matching_ngram_size", "of prompt lookup", 3, tests=("test_prompt_lookup.py::test_equals_the_definition",)
    ),
    refused("assistant_ensemble_weight", "`acceptance_rule=Mixture(weight)` is that rule", 0.5, "Mixture"),
    honoured(
        "assistant_early_exit",
        "drafts by the target's own first layers",
        tests=("test_early_exit.py::test_greedy_texts_equal_plain_ones",),
    ),
    honoured(
        "use_mtp",
        "drafts by layers of the target's checkpoint; rows of a batch one after another",
        tests=("test_candidate_generators.py::test_greedy_text_is_plain",),
    ),
    honoured(
        "speculation_type",
        "`assistant_model` says how it drafts; rows of a batch one after another",
        tests=("test_candidate_generators.py::test_greedy_text_is_plain",),
    ),
    inert("assistant_lookbehind", "of transformers' own way with another tokenizer; of no effect here", 3),
    inert("target_lookbehind", "of transformers' own way with another tokenizer; of no effect here", 3),
    refused("is_assistant", "transformers' own mark of a draft", True, "leave it out"),
)
OUTPUT = (
    honoured(
        "num_return_sequences",
        "independent rows; `cactus_delta` may have one value a prompt or one a returned row",
        tests=(
            "test_decoding.py::test_num_return_sequences",
            "test_decoding.py::test_delta_of_each_prompt_holds_for_all_its_returned_rows",
        ),
    ),
    inert(
        "return_dict_in_generate",
        "the output has `.speculation` besides",
        True,
        tests=("test_session.py::test_kinds_cover_the_text", "test_session.py::test_equals_that_of_plain_generation"),
    ),
    inert(
        "output_scores",
        "the target's processed logits, one entry a token; zeros behind a row's end",
        True,
        beside=RETURNED,
        tests=("test_session.py::test_scores_of_finished_rows_are_zero",),
    ),
    inert(
        "output_logits",
        "the target's raw logits, likewise",
        True,
        beside=RETURNED,
        tests=("test_session.py::test_scores_are_the_targets_processed_logits",),
    ),
    honoured(
        "output_attentions",
        "with eager attention, as in plain generation; from one more pass over the text",
        tests=("test_states.py::test_equal_those_of_plain_decoding",),
    ),
    inert(
        "output_hidden_states",
        "from one more pass over the text",
        True,
        beside=RETURNED,
        tests=("test_states.py::test_equal_those_of_plain_decoding",),
    ),
)
OTHERS = (
    refused("num_beams", "other than 1", 2, "Leave"),
    inert("early_stopping", BEAMS, True),
    inert("length_penalty", BEAMS, 2.0),
    inert("diversity_penalty", BEAMS, 0.5),
    inert("num_beam_groups", BEAMS, 2),
    refused("penalty_alpha", f"{HUB}: contrastive search", 0.5, "contrastive search", top_k=4, **FROM_HUB),
    refused("dola_layers", HUB, "low", "DoLa"),
    refused("constraints", f"{HUB}: constrained beam search", [1], "constrained beam search", **FROM_HUB),
    refused("force_words_ids", f"{HUB}: constrained beam search", [[5]], "constrained", num_beams=2, **FROM_HUB),
    inert("decoder_start_token_id", "of encoder-decoder models only", 4),
    inert("transformers_version", "a record", "5.17.0"),
)
CONFIG = LENGTH + SAMPLING + LOGITS + CACHE + DRAFTS + OUTPUT + OTHERS
SECTIONS = {
    "Length and end": LENGTH,
    "Sampling": SAMPLING,
    "Logits": LOGITS,
    "Cache and compilation": CACHE,
    "Drafts": DRAFTS,
    "Output": OUTPUT,
    "Other decoding methods": OTHERS,
    "Arguments of `generate()`": ARGUMENTS,
    "Inputs of the model": INPUTS,
    "Around the call": AROUND,
    "Keywords of this package": OWN,
}
OPTIONS = tuple(option for options in SECTIONS.values() for option in options)
