"""Encoder-decoder targets; drafts that have an encoder of their own, read the target's, or have none."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForCausalLM,
    WhisperForConditionalGeneration,
)

import cactus_hf
import tiny


SIZES = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
}  # fmt: skip
IDS = {"vocab_size": tiny.VOCAB, "pad_token_id": tiny.PAD, "eos_token_id": tiny.EOS, "bos_token_id": tiny.BOS}
GREEDY = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": None}


def built(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    model = model.eval()
    tiny.spread(model, seed=seed)
    head = model.get_output_embeddings().weight
    head.data *= 4 / head.data.std() / 32**0.5
    return model


def t5(seed: int = 0, attention: str = "sdpa") -> PreTrainedModel:
    config = T5Config(
        d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0, tie_word_embeddings=False,
        **IDS,
    )  # fmt: skip
    config._attn_implementation = attention
    return built(T5ForConditionalGeneration(config), seed)


def bart(seed: int = 0, attention: str = "sdpa") -> PreTrainedModel:
    config = BartConfig(max_position_embeddings=64, decoder_start_token_id=2, forced_eos_token_id=None, **SIZES, **IDS)
    config._attn_implementation = attention
    return built(BartForConditionalGeneration(config), seed)


def whisper_config() -> WhisperConfig:
    return WhisperConfig(
        num_mel_bins=8, max_source_positions=30, max_target_positions=64, decoder_start_token_id=4,
        suppress_tokens=None, begin_suppress_tokens=None, **SIZES | {"encoder_layers": 1}, **IDS,
    )  # fmt: skip


def whisper(seed: int = 0) -> PreTrainedModel:
    return built(WhisperForConditionalGeneration(whisper_config()), seed)


def whisper_decoder(of: PreTrainedModel, eps: float) -> PreTrainedModel:
    """A draft without an encoder, in the manner of distil-whisper's."""
    draft = WhisperForCausalLM(whisper_config()).eval()
    draft.model.decoder.load_state_dict(of.model.decoder.state_dict())
    draft.proj_out.load_state_dict(of.proj_out.state_dict())
    return tiny.perturbed(draft, eps)


MODELS = {"t5": t5, "bart": bart}
DRAFTS = {"own encoder": tiny.perturbed, "no encoder": lambda _: tiny.model("llama"), "target": lambda target: target}
SOURCES = torch.tensor([[7, 30, 22, 51, 60, 8], [5, 9, 71, 33, 40, 80], [13, 14, 15, 16, 17, 18]])
MASK = torch.tensor([[1] * 6, [1] * 4 + [0] * 2, [1] * 5 + [0]])  # an encoder's padding may stand anywhere


class TestText:
    @pytest.mark.parametrize("name", MODELS)
    @pytest.mark.parametrize("kind", ("own encoder", "no encoder", "target"))
    @pytest.mark.parametrize(("num_drafts", "attention"), ((1, "sdpa"), (5, "sdpa"), (5, "eager")))
    def test_greedy_text_is_plain(self, name, kind, num_drafts, attention):
        target = cactus_hf.enable(MODELS[name](attention=attention))
        draft = DRAFTS[kind](target)
        for row in range(3):
            inputs = {"input_ids": SOURCES[row : row + 1], "attention_mask": MASK[row : row + 1], **GREEDY}
            plain = target.generate(**inputs)
            options = {"assistant_model": draft, "cactus_delta": 1.0, "num_assistant_tokens": num_drafts}
            ours = target.generate(**inputs, **options, return_dict_in_generate=True)
            assert ours.sequences.tolist() == plain.tolist()
            if kind == "target":
                assert ours.speculation.acceptance_rate == 1

    @pytest.mark.parametrize("name", MODELS)
    def test_rows_of_a_batch_one_after_another(self, name):
        target = cactus_hf.enable(MODELS[name]())
        draft = tiny.perturbed(target)
        inputs = {"input_ids": SOURCES, "attention_mask": MASK, **GREEDY}
        plain = target.generate(**inputs)
        with pytest.warns(UserWarning, match="one after another"):
            ours = target.generate(**inputs, assistant_model=draft, cactus_delta=1.0)
        assert ours.tolist() == plain.tolist()

    def test_several_samples_of_one_source(self):
        target = cactus_hf.enable(t5())
        with pytest.warns(UserWarning, match="one after another"):
            samples = target.generate(
                SOURCES[:1], assistant_model=tiny.perturbed(target), do_sample=True, cactus_delta=0.5,
                max_new_tokens=9, num_return_sequences=3, eos_token_id=None,
            )  # fmt: skip
        assert samples.shape == (3, 10) and len({tuple(row) for row in samples.tolist()}) == 3

    def test_several_samples_of_several_sources(self):
        """The encoder's input is the one thing that `generate()` does not repeat for them."""
        target = cactus_hf.enable(bart())
        with pytest.warns(UserWarning, match="one after another"):
            samples = target.generate(
                SOURCES[:2], attention_mask=MASK[:2], assistant_model=tiny.perturbed(target), do_sample=True, top_k=1,
                cactus_delta=0.5, max_new_tokens=9, num_return_sequences=2, eos_token_id=None,
            )  # fmt: skip
        for source in range(2):
            inputs = {"input_ids": SOURCES[source : source + 1], "attention_mask": MASK[source : source + 1]}
            plain = target.generate(**inputs, **GREEDY | {"max_new_tokens": 9})
            assert samples[2 * source].tolist() == samples[2 * source + 1].tolist() == plain[0].tolist()

    def test_padded_decoder_prompts_are_refused(self):
        target = cactus_hf.enable(t5())
        ids, mask = torch.tensor([[0, 7, 8], [0, 0, 0]]), torch.tensor([[1, 1, 1], [0, 0, 1]])
        with pytest.raises(ValueError, match="decoder_attention_mask.*first column"):
            target.generate(
                SOURCES[:2], decoder_input_ids=ids, decoder_attention_mask=mask, cactus_delta=1.0, **GREEDY,
                assistant_model=tiny.model("llama"),
            )  # fmt: skip

    def test_prompt_lookup(self):
        target = cactus_hf.enable(t5())
        plain = target.generate(SOURCES[:1], **GREEDY)
        assert target.generate(SOURCES[:1], **GREEDY, prompt_lookup_num_tokens=3, cactus_delta=1.0).equal(plain)

    def test_encoder_outputs_given(self):
        target = cactus_hf.enable(t5())
        encoded = target.get_encoder()(SOURCES[:1])
        inputs = {"encoder_outputs": encoded, **GREEDY}
        plain = target.generate(**inputs)
        assert plain.equal(target.generate(**inputs, assistant_model=tiny.model("llama"), cactus_delta=1.0))
        with pytest.raises(ValueError, match="draft, T5ForConditionalGeneration, has an encoder.*encoder_outputs"):
            target.generate(**inputs, assistant_model=t5(), cactus_delta=1.0)

    @pytest.mark.parametrize("name", MODELS)
    def test_scores_states_and_cache(self, name):
        target = cactus_hf.enable(MODELS[name](attention="eager"))
        wanted = (
            "output_scores",
            "output_logits",
            "output_attentions",
            "output_hidden_states",
            "return_dict_in_generate",
        )
        options = {**GREEDY, **dict.fromkeys(wanted, True)}
        plain = target.generate(SOURCES[:1], **options)
        ours = target.generate(SOURCES[:1], **options, assistant_model=tiny.perturbed(target), cactus_delta=1.0)
        assert set(plain) == set(ours)
        for field in set(plain) - {cactus_hf.host.CACHE_NAME}:
            assert_alike(ours[field], plain[field])
        one, other = (output[cactus_hf.host.CACHE_NAME] for output in (ours, plain))
        assert one.get_seq_length() == other.get_seq_length()

    def test_a_draft_in_another_precision(self):
        target = cactus_hf.enable(bart())
        plain = target.generate(SOURCES[:1], **GREEDY)
        for draft in (tiny.perturbed(bart()).bfloat16(), tiny.perturbed(bart()).double()):
            assert target.generate(SOURCES[:1], **GREEDY, assistant_model=draft, cactus_delta=1.0).equal(plain)


class TestSpeech:
    FEATURES = torch.randn(1, 8, 60, generator=torch.Generator().manual_seed(1))

    @pytest.mark.parametrize(
        "kind", ("own encoder", "decoder only", "half precision", "decoder only in half precision")
    )
    def test_greedy_text_is_plain(self, kind):
        target = whisper()
        draft = whisper_decoder(target, 0.05) if "decoder only" in kind else tiny.perturbed(target)
        draft = draft.bfloat16() if "half" in kind else draft
        cactus_hf.enable(target)
        options = {"input_features": self.FEATURES, "do_sample": False, "max_new_tokens": 20}
        plain = target.generate(**options)
        config = copy.deepcopy(draft.generation_config.to_dict())
        with cactus_hf.track() as calls:
            ours = target.generate(**options, assistant_model=draft, cactus_delta=1.0)
        assert ours.tolist() == plain.tolist()
        assert len(calls) == 1 and int(calls[0].accepted.sum()) > 0
        assert draft.generation_config.to_dict() == config
        assert not hasattr(draft.generation_config, "force_unique_generate_call")

    def test_sampling_and_a_dictionary(self):
        target = cactus_hf.enable(whisper())
        output = target.generate(
            self.FEATURES, assistant_model=tiny.perturbed(target), do_sample=True, cactus_delta=0.5, max_new_tokens=9,
            return_dict_in_generate=True,
        )  # fmt: skip
        assert output["sequences"].shape[0] == 1


def assert_alike(one, other) -> None:
    if isinstance(one, torch.Tensor):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-3)
    elif one is not None:
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_alike(a, b)
