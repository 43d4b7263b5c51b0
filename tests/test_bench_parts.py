"""What `cactus-hf bench` measures with: passes of models, bytes, prompts, random weights, other packages."""

from __future__ import annotations

import math

import pytest
import torch

import tiny
from cactus_hf import cli, enable, measuring
from cactus_hf.bench import forwards, memory, methods, presets, prompts, provenance, rivals, running, verifying
from cactus_hf.bench.forwards import BareForwards, Forward, ForwardClock, Shape
from cactus_hf.measuring import Counts


CPU = torch.device("cpu")


def passes(*each: tuple[str, int, float, float]) -> list[Forward]:
    return [Forward(Shape(role, 1, width), seconds, end) for role, width, seconds, end in each]


def test_rounds_are_timed_from_where_both_models_have_read() -> None:
    seen = passes(
        ("target", 9, 2.0, 3.0),
        ("draft", 9, 1.0, 5.0),  # both have read the prompt at 5
        ("draft", 1, 0.5, 6.0),
        ("target", 3, 1.0, 8.0),
        ("draft", 2, 0.5, 9.0),
        ("target", 3, 1.0, 10.5),
        ("draft", 1, 0.5, 11.0),  # no round: the target did not check it
    )
    rounds = forwards.rounds_of(seen)
    assert rounds.durations == [3.0, 2.5] and rounds.in_forwards == [1.5, 1.5]
    assert forwards.behind_prompts(seen) == seen[2:]


def test_rounds_of_stock_leave_out_the_one_that_reads() -> None:
    seen = passes(("draft", 9, 1.0, 1.0), ("draft", 1, 1.0, 2.0), ("target", 11, 1.0, 4.0), ("target", 3, 1.0, 6.0))
    assert forwards.rounds_of(seen).durations == [2.0]
    assert forwards.rounds_of([]).durations == []


def test_common_shapes_leave_out_rare_ones_but_no_model() -> None:
    usual, rare = Shape("target", 1, 4), Shape("target", 1, 2)
    shapes = [usual] * 95 + [rare] * 4 + [Shape("draft", 1, 1)]
    assert forwards.common_shapes(Forward(shape, 1.0, 1.0) for shape in shapes) == {usual, Shape("draft", 1, 1)}


def test_bare_time_is_that_of_the_same_passes() -> None:
    target, draft = tiny.pair("llama")
    bare = BareForwards({"target": target, "draft": draft}, context=20, prompt_len=9)
    bare.samples = {Shape("target", 1, 3): [1.0, 2.0, 9.0], Shape("draft", 1, 1): [0.5]}
    bare.prompt_samples = {("target", 1): [4.0], ("draft", 1): [2.0]}
    calls = [passes(("target", 9, 0, 0), ("draft", 9, 0, 0), ("draft", 1, 0, 0), ("target", 3, 0, 0))]
    assert bare.least_seconds(calls) == 4.0 + 2.0 + 0.5 + 2.0
    rare = [calls[0] + passes(("target", 2, 0, 0))]  # was not measured, so the nearest stands for it
    assert bare.least_seconds(rare) == bare.least_seconds(calls) + 2.0


def test_bare_passes_leave_the_cache_as_it_was(monkeypatch) -> None:
    target = tiny.model("llama")
    lengths = []
    hook = target.register_forward_hook(lambda *call: lengths.append(call[-1].logits.shape[1]))
    bare = BareForwards({"target": target}, context=20, prompt_len=9)
    caches: list = []
    monkeypatch.setattr(bare, "_read", lambda *asked, read=bare._read: caches.append(read(*asked)) or caches[-1])
    bare.measure([Shape("target", 2, 3)], [("target", 2)])
    hook.remove()
    assert len(bare.samples[Shape("target", 2, 3)]) == forwards.BARE_PASSES and lengths[-1] == 3
    assert [cache.get_seq_length() for cache, _ in caches] == [20, 9] and len(bare.prompt_samples["target", 2]) == 1


def test_clock_sees_every_pass_and_leaves_no_hook() -> None:
    target, draft = tiny.pair("llama")
    with ForwardClock({"target": target, "draft": draft}, CPU, is_timing=True) as clock:
        target(torch.tensor([[5, 6, 7], [5, 6, 7]]))
        draft(input_ids=torch.tensor([[5]]))
    assert [each.shape for each in clock.take()] == [Shape("target", 2, 3), Shape("draft", 1, 1)]
    assert not clock.take() and not target._forward_hooks and not target._forward_pre_hooks
    with ForwardClock({"target": target}, CPU, is_timing=False) as clock:
        target(torch.tensor([[5]]))
    assert math.isnan(clock.take()[0].seconds)


def decoders(target, draft, do_sample: bool = True) -> methods.Decoders:
    settings = {"max_new_tokens": 20, "eos_token_id": None, "pad_token_id": tiny.PAD, "do_sample": do_sample}
    return methods.Decoders(enable(target), draft, settings, rivals.Sampling(not do_sample, 0.7, 1.0))


def batch() -> prompts.Batch:
    return prompts.batches([[5, 6, 7, 8], [9, 8]], 2, tiny.PAD, CPU)[0]


def test_calls_draw_numbers_of_their_own() -> None:
    each = decoders(*tiny.pair("llama"))
    each.acceptance = 0.5  # the lots say how many rounds there are
    alike = prompts.batches([[5, 6, 7]] * 8, 1, tiny.PAD, CPU)
    calls = [each.run(methods.Method("cactus", 3), alike, seed, is_timing=False) for seed in (1, 1, 2)]
    first, again, other = ([len(call.forwards) for call in run] for run in calls)
    assert len(set(first)) > 1 and first == again != other


def test_stock_counts_are_those_of_a_perfect_draft() -> None:
    target = tiny.model("llama")
    draft = tiny.perturbed(target, eps=0.0)
    before = dict(vars(draft.generation_config))
    calls = decoders(target, draft, do_sample=False).run(methods.Method("stock", 3), [batch()], 0, is_timing=False)
    assert len(calls) == 2, "a row at a time"
    for call in calls:
        assert call.num_tokens == 20 and call.counts == Counts(5, 15, 15, 15, 20)
    assert all(vars(draft.generation_config).get(name) == value for name, value in before.items())


@pytest.mark.parametrize("is_in_step", [True, False])
def test_passes_are_timed_in_a_turn_of_their_own_where_that_means_to_wait(is_in_step: bool, monkeypatch) -> None:
    monkeypatch.setattr(running, "works_in_step", lambda device: is_in_step)
    each = decoders(*tiny.pair("llama", eps=0.1))
    runs = []
    monkeypatch.setattr(each, "run", lambda *a, run=each.run, **own: runs.append(own["is_timing"]) or run(*a, **own))
    cell = running.Cell(2, None, [batch()])
    (found,) = running.measure(each, cell, [methods.Method("cactus", 3, 0.0)], 0, 2, progress=lambda name: None)
    assert runs == [False, True, True] if is_in_step else runs == [False, False, True, False]
    assert len(found.seconds) == 2 and found.overhead_ms > 0 and 0 < found.efficiency < math.inf
    assert found.pass_ms("target") > 0 and sum(each.num for each in found.passes if each.shape.role == "target") > 8


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, about their calls
@pytest.mark.parametrize("do_sample", [False, True])
def test_economize_writes_and_counts(do_sample: bool) -> None:
    pytest.importorskip("economize")
    target, draft = tiny.pair("llama", eps=0.1)
    (call,) = decoders(target, draft, do_sample).run(methods.Method("economize", 3), [batch()], 0, is_timing=True)
    assert call.num_tokens == 40 and call.counts is not None
    # The first token of a row belongs to no round; a last round may keep more than there is room for
    assert call.counts.emitted == 38 <= call.counts.accepted + call.counts.rounds <= 38 + 2 * 3
    shapes = [each.shape for each in call.forwards]
    assert [each.role for each in shapes[:2]] == ["target", "draft"] and {each.rows for each in shapes} == {2}
    assert max(each.width for each in shapes[2:] if each.role == "target") == 4


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("do_sample", [False, True])
def test_flashspec_writes_and_counts(do_sample: bool) -> None:
    pytest.importorskip("flashspec")
    target, draft = tiny.pair("llama", eps=0.1)
    calls = decoders(target, draft, do_sample).run(methods.Method("flashspec", 3), [batch()], 0, is_timing=True)
    assert [call.num_tokens for call in calls] == [20, 20], "a row at a time"
    for call in calls:
        assert 20 <= call.counts.accepted + call.counts.rounds <= 20 + 3
        assert sum(each.shape.role == "target" for each in call.forwards) >= call.counts.rounds


def test_counts() -> None:
    counts = Counts.of_rounds([(3, 3), (3, 1), (2, 2)], emitted=9)
    assert counts == Counts(rounds=3, drafted=8, verified=7, accepted=6, emitted=9)
    assert (counts.tokens_per_round, counts.accepted_length, counts.acceptance) == (3.0, 2.0, 6 / 7)
    assert counts.plus(counts).acceptance == counts.acceptance and Counts().acceptance is Counts().ball_kl is None


def test_turns_end_with_the_time(monkeypatch) -> None:
    assert list(measuring.turns(3)) == [0, 1, 2] and list(measuring.turns(5, time_limit=0.0)) == [0]
    speeds = measuring.Speeds()
    speeds.new_tokens, speeds.seconds = [10, 30], [2, 3]
    assert speeds.rates == [5, 10]
    speeds.new_tokens, speeds.seconds = [10, 40, 20], [1, 1, 1]
    assert speeds.spread == 1.5


def test_batches_fill_up_and_pad_on_the_left() -> None:
    first, second = prompts.batches([[1, 2, 3], [4], [5, 6]], 2, 0, CPU)
    assert first.input_ids.tolist() == [[1, 2, 3], [0, 0, 4]] and first.attention_mask.tolist() == [[1] * 3, [0, 0, 1]]
    assert second.input_ids.tolist() == [[0, 5, 6], [1, 2, 3]], "the first prompt again"
    assert [row.input_ids.tolist() for row in first.rows()] == [[[1, 2, 3]], [[4]]]
    assert running.Cell(2, None, [first, second]).mean_prompt_len == 9 / 4


def test_prompts_are_stretched_by_the_others() -> None:
    assert prompts.stretch([[1, 2], [3]], 5) == [[1, 2, 3, 1, 2], [3, 1, 2, 3, 1]]


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "holds no prompts"),
        ('{"prompt": "a"}\nnot JSON', "line 2 is no prompt"),
        ('{"text": "a"}', "line 1 is no prompt"),
        ('["a"]', "line 1 is no prompt"),
        ('{"prompt": ""}', "has the prompt ''"),
        ('{"prompt": [{"role": "user"}]}', "has the prompt"),
    ],
)
def test_files_that_hold_no_prompts(text: str, said: str, tmp_path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match=said):
        prompts.read_prompts(str(file))


@pytest.mark.parametrize(
    "name, millions",  # the published numbers of parameters
    [("qwen3-0.6b", 596.05), ("qwen3-8b", 8190.74), ("qwen2.5-1.5b", 1543.71), ("llama-3.2-1b", 1235.81)],
)
def test_presets_have_the_published_sizes(name: str, millions: float) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**presets.SHAPES[name]))
    assert model.num_parameters() / 1e6 == pytest.approx(millions, abs=0.01)


def test_random_weights_make_a_sound_model() -> None:
    shape = {**presets.SHAPES["qwen2.5-0.5b"], "vocab_size": 300, "intermediate_size": 64}
    model = presets.build(shape, CPU, torch.bfloat16, num_layers=2)
    assert len(model.model.layers) == 2 and model.dtype == torch.bfloat16 and not model.training
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    usual = type(model)(model.config)
    assert model.model.rotary_emb.inv_freq.equal(usual.model.rotary_emb.inv_freq)
    assert model.state_dict().keys() == usual.state_dict().keys()
    logits = model(torch.tensor([[1, 2, 3]])).logits
    assert logits.isfinite().all() and logits.float().std() > 0.1


def test_bytes_are_those_read_and_written() -> None:
    a, b = torch.zeros(10, 100), torch.ones(10, 100)
    index = torch.zeros(10, 1, dtype=torch.long)
    assert verifying.bytes_moved(lambda: a + b) == 3 * 4000
    assert verifying.bytes_moved(lambda: a.add_(b)) == 3 * 4000
    assert verifying.bytes_moved(lambda: a[:, 1:].t().unsqueeze(0)) == 0
    assert verifying.bytes_moved(lambda: a.sum(-1)) == 4000 + 40
    assert verifying.bytes_moved(lambda: a.gather(1, index)) == 2 * 40
    assert verifying.bytes_moved(lambda: a.double()) == 4000 + 8000


def test_all_ways_verify_alike() -> None:
    block = verifying.drawn_block(4000, 2, 9, dtype=torch.float32, device=CPU, seed=1)
    ours = verifying.ways(block)["cactus_hf"]().num_accepted.double()
    naive = verifying.naive(block)[0].double()
    # Both are means of 4,000 numbers of the same law, of a spread below 1
    assert abs(float(ours.mean() - naive.mean())) < 4 * math.sqrt(2 / 4000)
    row = verifying.drawn_block(1, 2, 9, dtype=torch.float32, device=CPU, seed=1)
    assert set(verifying.ways(row)) == {"cactus_hf", "cactus_hf*", "stock", "naive"} and "stock" not in verifying.ways(
        block
    )
    tokens, kept = verifying.ways(row)["stock"]()
    assert tokens.shape == (1, int(kept) + 1)


def test_verify_command(tmp_path, capsys, monkeypatch) -> None:
    import json

    monkeypatch.setattr(verifying, "TURN_SECONDS", 0.0)
    file = tmp_path / "verify.jsonl"
    asked = ["--verify", "--vocab-sizes", "50", "70", "--batch-sizes", "1", "3", "--num-assistant-tokens", "2"]
    assert cli.main(["bench", *asked, "--repeats", "2", "--device", "cpu", "--json", str(file)]) == 0
    out, err = capsys.readouterr()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert not err and len(lines) == 2 * (4 + 3)
    assert all(len(line["ms"]) == 2 and line["bytes_per_request_in_V"] > 3 * 4 for line in lines)
    assert out.count("\nnaive") == 4 and out.count("\nstock") == 2


def test_revision_and_memory_are_known_here() -> None:
    revision = provenance.git_revision()
    assert revision is None or len(revision.removesuffix("-dirty")) == 40
    memory.reset_peak(CPU)
    found = memory.peak(CPU)
    assert found is None or found[0] > 10e6
