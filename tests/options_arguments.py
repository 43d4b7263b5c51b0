"""Rows of the table of options: arguments of `generate()` and the inputs of models, keywords of this package."""

from __future__ import annotations

import torch
from options_page import Option, equal, honoured, inert, refused
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

import tiny


BYTES = tiny.byte_tokenizer()


def last(values: torch.Tensor, value: int) -> torch.Tensor:
    """`values` [B, T] with another last column."""
    return torch.cat([values[:, :-1], torch.full_like(values[:, -1:], value)], dim=1)


def positions(prompts: tiny.Prompts) -> torch.Tensor:
    return (prompts.attention_mask.cumsum(1) - 1).clamp_min(0)


def embeddings(prompts: tiny.Prompts) -> torch.Tensor:
    return torch.ones(*prompts.input_ids.shape, 32)


def shifted(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores.roll(ids.shape[1] % 3, -1)


ARGUMENTS = (
    equal(
        "inputs",
        "token ids; `input_ids` is the same",
        calls=(
            lambda p: {"inputs": p.input_ids.flip(0), "input_ids": None, "attention_mask": p.attention_mask.flip(0)},
        ),
    ),
    equal(
        "generation_config",
        "`cactus_delta` may stand in it",
        GenerationConfig(repetition_penalty=1.3),
        tests=("test_generation.py::test_in_a_generation_config_passed_in",),
    ),
    equal(
        "logits_processor",
        "one that remembers earlier calls must allow `copy.deepcopy`; drafts are tried on copies",
        LogitsProcessorList([shifted]),
        tests=("test_remembering.py::test_equals_plain_rows", "test_remembering.py::test_what_cannot_be_copied"),
    ),
    equal(
        "stopping_criteria",
        "asked about each committed prefix, once",
        StoppingCriteriaList([lambda ids, scores, **_: ids.shape[1] >= 24]),
        tests=("test_session.py::test_criteria_of_the_user_end_rows_inside_a_block",),
    ),
    equal("prefix_allowed_tokens_fn", "", lambda row, ids: list(range(10 * row + len(ids) % 2, 10 * row + 30))),
    honoured(
        "assistant_model",
        "the draft: a smaller model",
        tests=(
            "test_families.py::test_a_ragged_batch_equals_plain_rows",
            "test_validation.py::test_another_tokenizer",
        ),
    ),
    honoured(
        "streamer",
        "one row; gets tokens as soon as they are committed; a batch is refused",
        tests=(
            "test_session.py::test_tokens_come_as_they_are_committed",
            "test_session.py::test_text_streamers",
            "test_validation.py::test_bad_options",
        ),
    ),
    inert("tokenizer", "for `stop_strings`, `token_healing` and `assistant_tokenizer`", BYTES),
    inert(
        "assistant_tokenizer",
        "of a draft with another tokenizer: it drafts the tokens that both have",
        BYTES,
        beside={"tokenizer": BYTES},
        tests=(
            "test_other_tokenizers.py::test_texts_equal_plain_ones",
            "test_other_tokenizers.py::test_it_samples_the_law_of_its_rounds",
        ),
    ),
    equal(
        "negative_prompt_ids",
        "for `guidance_scale`",
        calls=(lambda p: {"negative_prompt_ids": p.input_ids[:, -2:], "guidance_scale": 1.5},),
    ),
    equal(
        "negative_prompt_attention_mask",
        "for `guidance_scale`",
        calls=(
            lambda p: {
                "negative_prompt_ids": p.input_ids[:, -3:],
                "negative_prompt_attention_mask": last(p.attention_mask[:, -3:], 0).flip(1),
                "guidance_scale": 1.5,
            },
        ),
    ),
    honoured(
        "synced_gpus",
        "several processes: see [multiple_processes.md](multiple_processes.md)",
        tests=("test_ranks.py::test_text_and_cache_are_those_of_the_process_alone",),
    ),
    refused(
        "custom_generate",
        "a function; for a folder see [integrations.md](integrations.md)",
        lambda *_, **__: 0,
        "leave",
    ),
    inert("trust_remote_code", "for `custom_generate`", True),
)
INPUTS = (
    equal(
        "attention_mask",
        "of integers, booleans or floats; made from `pad_token_id` if not given; padding on the right is refused",
        calls=(
            lambda p: {"attention_mask": p.attention_mask.bool(), "repetition_penalty": 1.3},
            lambda p: {"attention_mask": p.attention_mask.float(), "repetition_penalty": 1.3},
            lambda p: {"attention_mask": None, "repetition_penalty": 1.3},
        ),
        refused=((lambda p: {"attention_mask": last(p.attention_mask, 0)}, "padding_side"),),
    ),
    inert(
        "position_ids",
        "one a token",
        calls=(lambda p: {"position_ids": positions(p)},),
        refused=((lambda p: {"position_ids": positions(p)[:, 1:]}, "position_ids.*one value a token"),),
        tests=("test_options.py::test_positions_that_start_elsewhere",),
    ),
    Option(
        "inputs_embeds",
        "refused",
        "drafts need token ids",
        refused=(
            (lambda p: {"inputs_embeds": embeddings(p)}, "inputs_embeds.*Pass `input_ids`"),
            (lambda p: {"inputs_embeds": embeddings(p), "input_ids": None}, "inputs_embeds.*Pass `input_ids`"),
        ),
    ),
    honoured(
        "cache",
        "`past_key_values` in transformers 5.17; a `DynamicCache` of an earlier turn or a prefilled prompt, along "
        "with the ids of the whole text; it is filled",
        tests=(
            "test_session.py::test_serves_the_next_turn",
            "test_options.py::test_a_prefilled_prompt",
            "test_options.py::test_caches_that_do_not_fit",
        ),
    ),
)
AROUND = (
    honoured(
        "attn_implementation",
        "eager and sdpa take the rows of a batch together, others one after another (FlashAttention was not run); one "
        "for which transformers makes no masks is refused",
        tests=(
            "test_options.py::test_attention_of_the_users_own",
            "test_families.py::test_a_ragged_batch_equals_plain_rows",
        ),
    ),
    honoured(
        "dtype",
        "bfloat16 and float16 round by the shape of a batch: texts may part from plain ones at near-ties",
        tests=("test_options.py::test_half_precision", "test_cases.py::test_r25_bfloat16"),
    ),
    Option(
        "generate_batch",
        "refused",
        "continuous batching decodes without drafts",
        tests=("test_options.py::test_continuous_batching",),
    ),
)
OWN = (
    honoured(
        "cactus_delta",
        "nats, one number or one a row; also in a `generation_config`",
        tests=(
            "test_decoding.py::test_cactus_samples_the_law_of_its_rounds",
            "test_decoding.py::test_delta_of_each_row",
            "test_generation.py::test_in_the_models_generation_config",
            "test_validation.py::test_bad_options",
        ),
    ),
    honoured(
        "cactus_kl",
        "most nats of the emitted law's divergence at a position, one number or one a row, instead of `cactus_delta`; "
        "also in a `generation_config`; see [budget.md](budget.md)",
        tests=(
            "test_kl_budget.py::test_by_enumeration_no_budget_is_exceeded_and_hardly_any_is_left",
            "test_budget_generate.py::test_a_budget_of_each_row",
            "test_budget_generate.py::test_survive_saving",
            "test_validation.py::test_bad_options",
        ),
    ),
    honoured(
        "cactus_kl_total",
        "most nats of all positions of a row together, with or without `cactus_kl`; then the row is lossless; also in "
        "a `generation_config`",
        tests=(
            "test_kl_budget.py::test_no_sum_exceeds_the_total",
            "test_budget_generate.py::test_a_total",
            "test_budget_generate.py::test_no_row_spends_more_than_its_total",
            "test_budget_generate.py::test_each_returned_row_has_a_total",
        ),
    ),
    honoured(
        "acceptance_rule",
        "instead of `cactus_delta`",
        tests=("test_decoding.py::test_other_rules_sample_the_law_of_their_rounds",),
    ),
    honoured(
        "speculation_kl",
        "measures the divergence of the emitted law; with `cactus_kl` and `cactus_kl_total` it is known anyway",
        tests=("test_decoding.py::test_acceptance_and_divergence_grow_with_delta",),
    ),
    honoured(
        "generator",
        'a `torch.Generator`, or a seed a row; for the schedule `"auto"` see [draft_length.md](draft_length.md)',
        tests=(
            "test_decoding.py::test_seeded_rows_sample_the_target",
            "test_decoding.py::test_a_seeded_row_does_not_depend_on_its_neighbours",
        ),
    ),
    honoured(
        "speculation_costs",
        'seconds of a round, for `num_assistant_tokens_schedule="auto"`; also in a `generation_config`',
        tests=(
            "test_auto_generate.py::test_the_same_seed_gives_the_same_text",
            "test_auto_generate.py::test_costs_are_saved_with_the_model",
            "test_auto_generate.py::test_errors_come_before_any_pass",
        ),
    ),
)
