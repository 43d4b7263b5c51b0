"""The recipe of the draft, on a target of two layers and 260 byte tokens."""

from __future__ import annotations

import json
from itertools import islice

import pytest
import torch

import tiny
from cactus_hf.embedded import distill
from cactus_hf.embedded.draft import load_draft, trained_parts
from cactus_hf.embedded.self_prompting import ANSWER, GIVEN, QUESTION, Sample, SamplingConfig, SelfPrompting, Template
from cactus_hf.embedded.shards import collate, rank_ids, read_shard, write_shard
from cactus_hf.embedded.training import Stream, Trainer, TrainingConfig, law_gradient, start_draft
from cactus_hf.embedded.written_prompts import written_prompts


SIZES = {"answer_len": 12, "question_len": 10, "batch": 6, "slots": 60}


@pytest.fixture(scope="module")
def target():
    return tiny.ARCHITECTURES["llama"].build(vocab=260, max_position_embeddings=128)


@pytest.fixture(scope="module")
def tokenizer():
    return tiny.byte_tokenizer()


def sampler(target, tokenizer, prompts=("one?", "two?"), **options) -> SelfPrompting:
    config = SamplingConfig(given_share=0.3, written_share=0.1, **{**SIZES, **options})
    return SelfPrompting(target, tokenizer, list(prompts), config)


def texts(samples: list[Sample]) -> list[list[int]]:
    return [sample.tokens.tolist() for sample in samples]


def test_template_pieces_make_up_the_chat_template(tokenizer):
    template = Template.of(tokenizer)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert template.prefix + tokenizer("hi", add_special_tokens=False)["input_ids"] + template.turn == whole


def test_hidden_states_are_those_of_the_target_on_the_text(target, tokenizer):
    """Also for rows that started late in a wave, among slots of earlier conversations, which must not show."""
    source = sampler(target, tokenizer)
    prefix, samples = source.template.prefix, list(source.wave(seed=3))
    assert len(samples) > SIZES["batch"]  # some rows held more than one conversation
    for sample in samples:
        with torch.no_grad():
            wanted = target.model(torch.tensor([prefix + sample.tokens.tolist()])).last_hidden_state[0, len(prefix) :]
        error = (sample.hidden.float() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
        assert (
            error.mean() < 0.03
        )  # bfloat16 products: 2^-9 each, over two layers; a wrong mask or position gives about 1


def test_a_wave_is_the_same_for_the_same_seed_and_kinds_mark_the_turns(target, tokenizer):
    source = sampler(target, tokenizer)
    first, again, other = (list(source.wave(seed)) for seed in (1, 1, 2))
    assert texts(first) == texts(again) != texts(other)
    turn = source.template.turn
    for sample in first:
        kinds = sample.kinds.tolist()
        answer = kinds.index(ANSWER)
        assert sample.tokens[answer - len(turn) : answer].tolist() == turn
        assert set(kinds[answer:]) == {ANSWER} and len(kinds) - answer <= SIZES["answer_len"]
        assert kinds.count(QUESTION) <= SIZES["question_len"]
    assert any(QUESTION not in sample.kinds.tolist() for sample in first)  # given prompts were used


@pytest.mark.parametrize("vocab", [7, 700])  # less than a block, and blocks of which the last is not full
def test_tokens_are_drawn_from_the_softmax(target, tokenizer, vocab):
    source = sampler(target, tokenizer)
    source.generator.manual_seed(0)
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(1)) * 2
    draws = 40_000
    tokens = torch.cat(
        [source.draw(logits.expand(2000, -1), torch.full((2000,), ANSWER)) for _ in range(draws // 2000)]
    )
    wanted = (logits / 0.7).softmax(-1)
    found = torch.bincount(tokens, minlength=vocab) / draws
    is_large = wanted * draws >= 25
    error = (wanted * (1 - wanted) / draws).sqrt()
    assert ((found - wanted).abs() < 5 * error)[is_large].all()
    rest = wanted[~is_large].sum()
    assert (found[~is_large].sum() - rest).abs() <= 5 * (rest / draws).sqrt()


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_law_gradient_is_what_autograd_gives(share):
    generator = torch.Generator().manual_seed(0)
    hidden, wanted = (torch.randn(5, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    head = torch.randn(9, 6, generator=generator, dtype=torch.float64)
    weights = torch.tensor([0.1, 0.2, 0.3, 0.15, 0.25])
    gradient, kept = law_gradient(hidden, wanted, head, weights, 0.7, share)
    hidden.requires_grad_(True)
    draft_log, target_log = ((h @ head.T / 0.7).log_softmax(-1) for h in (hidden, wanted))
    accepted = torch.minimum(draft_log.exp(), target_log.exp()).sum(-1)
    kl = (target_log.exp() * (target_log - draft_log)).sum(-1)
    (weights * ((1 - share) * kl - share * accepted)).sum().backward()
    torch.testing.assert_close(gradient.double(), hidden.grad, atol=1e-6, rtol=1e-5)  # the function returns float32
    torch.testing.assert_close(kept.double(), accepted.detach(), atol=1e-6, rtol=1e-5)


def test_a_position_is_weighted_by_the_token_it_predicts():
    sample = Sample(
        torch.tensor([5, 6, 7, 8]), torch.tensor([GIVEN, QUESTION, ANSWER, ANSWER]), torch.zeros(4, 3).half()
    )
    short = Sample(torch.tensor([5, 6]), torch.tensor([GIVEN, ANSWER]), torch.ones(2, 3).half())
    batch = collate([sample, short], [1, 2], torch.tensor([0.2, 0.3, 1.0]), pad=0)
    assert batch.tokens.tolist() == [[1, 2, 5, 6, 7, 8], [1, 2, 5, 6, 0, 0]]
    torch.testing.assert_close(batch.weights, torch.tensor([[0, 0, 0.3, 1, 1, 0], [0, 0, 1, 0, 0, 0]]))


def test_shards_make_the_round_trip_and_rank_ids_by_mass(target, tokenizer, tmp_path):
    samples = list(sampler(target, tokenizer).wave(seed=0))
    written = write_shard(tmp_path / "0.safetensors", samples)
    read = read_shard(tmp_path / "0.safetensors")
    assert written == sum(len(s.tokens) for s in samples) and texts(read) == texts(samples)
    assert all(torch.equal(a.hidden, b.hidden) for a, b in zip(read, samples, strict=True))
    head = target.get_output_embeddings().weight.detach()
    ranked = rank_ids([tmp_path / "0.safetensors"], head, 0.7)
    assert ranked.sort().values.equal(torch.arange(260))
    answers = torch.cat([s.hidden[s.kinds == ANSWER] for s in read]).float()
    mass = (answers @ head.T / 0.7).softmax(-1).mean(0)
    assert mass[ranked[:60]].sum() > 1.5 * mass[ranked[-60:]].sum()


def test_the_stream_takes_new_shards_and_never_the_held_out_one(target, tokenizer, tmp_path):
    source = sampler(target, tokenizer)
    for number in range(2):
        write_shard(tmp_path / f"{number}.safetensors", source.wave(seed=number))
    config = TrainingConfig(tokens_per_step=120)
    stream = Stream(tmp_path, {"0.safetensors"}, source.template.prefix, source.template.stop, config)
    batches = iter(stream)
    sizes = [next(batches).tokens.numel() for _ in range(30)]
    write_shard(tmp_path / "2.safetensors", source.wave(seed=2))
    for _ in range(60):
        next(batches)
    assert set(stream.visits) == {"1.safetensors", "2.safetensors"} and max(sizes) <= 120
    with pytest.raises(ValueError, match="distill sample"):
        next(iter(Stream(tmp_path / "none", set(), [], 0, config)))


def test_a_stopped_run_goes_on_as_if_it_had_not_been(target, tokenizer, tmp_path):
    source = sampler(target, tokenizer)
    write_shard(tmp_path / "0.safetensors", source.wave(seed=0))
    config = TrainingConfig(layers=(0,), steps=4, tokens_per_step=200)
    stream = iter(Stream(tmp_path, set(), source.template.prefix, source.template.stop, config))
    batches = [next(stream) for _ in range(6)]
    kept_ids = torch.arange(260)
    whole, first, second = (Trainer(start_draft(target, config.layers, kept_ids), config) for _ in range(3))
    steps: list[int] = []
    whole.run(batches, lambda figures: steps.append(figures["step"]))
    first.run(batches[:2], lambda figures: None)
    first.save(tmp_path / "run.state")
    second.restore(tmp_path / "run.state")
    second.run(batches[2:], lambda figures: steps.append(figures["step"]))
    assert steps == [1, 2, 3, 4, 3, 4]
    for name in whole.average:
        assert torch.equal(whole.average[name], second.average[name]), name


def test_the_command_from_sampling_to_a_better_draft(target, tokenizer, tmp_path, capsys):
    model, data, draft, prompts = (
        str(tmp_path / name) for name in ("model", "data", "draft.safetensors", "prompts.jsonl")
    )
    target.save_pretrained(model)
    tokenizer.save_pretrained(model)
    with open(prompts, "w") as file:
        file.write('{"category": "a", "turns": ["first?", "second?"]}\n{"category": "b", "prompt": "never"}\n')
    sizes = [f"--{name.replace('_', '-')}={SIZES[name]}" for name in SIZES]
    distill.main(["sample", "--target", model, "--data", data, "--tokens", "900", "--prompts", prompts, *sizes])
    options = ["--layers", "0", "--kept-ids", "200", "--tokens-per-step", "250", "--learning-rate", "3e-3"]
    train_command = ["train", "--target", model, "--data", data, "--out", draft, *options, "--report-seconds", "0"]
    distill.main([*train_command, "--steps", "60"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    progress = [line["dev_acceptance"] for line in lines if "dev_acceptance" in line]
    assert progress[-1] > progress[0] + 0.02
    again = [*train_command, "--out", str(tmp_path / "again.safetensors"), "--start", draft, "--steps", "1"]
    distill.main(again)
    assert json.loads(capsys.readouterr().out.splitlines()[0])["dev_acceptance"] > progress[-1] - 0.01
    with pytest.raises(ValueError, match="has 1 layers, and 2 are asked for"):
        distill.main([*again, "--layers", "0,1"])
    distill.main(["average", "--target", model, draft, draft, "--out", str(tmp_path / "mean.safetensors")])
    parts = [trained_parts(load_draft(target, tmp_path / name)) for name in ("draft.safetensors", "mean.safetensors")]
    for name, parameter in parts[0].items():
        torch.testing.assert_close(parts[1][name], parameter, atol=1e-6, rtol=1e-5)
    evaluate = ["evaluate", "--target", model, "--draft", draft, "--prompts", prompts, "--categories", "a"]
    for _ in range(2):
        distill.main([*evaluate, "--max-new-tokens", "10"])
    figures, again = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert figures == again and figures["prompts"] == 1 and 1 <= figures["positions"] <= 10
    assert 0 < figures["acceptance"] <= figures["ceiling"] <= 1
    assert load_draft(target, draft).config.num_hidden_layers == 1


@pytest.mark.parametrize("text", ['{"id": 1}\n', ""])
def test_prompts_that_cannot_be_read_are_refused(tmp_path, text):
    (tmp_path / "prompts.jsonl").write_text(text)
    with pytest.raises(ValueError, match="prompts.jsonl"):
        distill.read_prompts(tmp_path / "prompts.jsonl")


def test_training_needs_two_shards(target, tokenizer, tmp_path):
    target.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="at least 2"):
        distill.main(
            ["train", "--target", str(tmp_path), "--data", str(tmp_path / "none"), "--out", str(tmp_path / "x")]
        )


def test_written_prompts_fill_every_gap_and_repeat_with_the_seed():
    first, again, other = (list(islice(written_prompts(seed), 3000)) for seed in (0, 0, 1))
    assert first == again != other and len(set(first)) > 1500
    assert not any("{" in prompt.split("def ")[0] or "\x00" in prompt for prompt in first)
