"""Processors that remember what they were called with: each sees every committed prefix once, in order."""

from __future__ import annotations

import copy
import functools
import types

import laws
import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, SynthIDTextWatermarkingConfig

import cactus_hf
import tiny


GREEDY = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": None, "pad_token_id": tiny.PAD}
LENGTHS = ((5,), (5, 17, 9, 2))
SYNTH_ID = SynthIDTextWatermarkingConfig(ngram_len=3, keys=[1, 5, 9, 11, 13])


@pytest.fixture
def pair():
    target, draft = tiny.pair("qwen3", eps=0.02)
    return cactus_hf.enable(copy.deepcopy(target)), draft


class Counting(LogitsProcessor):
    """Moves the scores by how often it was called."""

    def __init__(self):
        self.calls, self.lengths = 0, []

    def __call__(self, ids, scores):
        self.calls += 1
        self.lengths.append(ids.shape[1])
        return scores.roll(self.calls % 5, -1)


class Slotted:
    """The same without a dictionary of attributes."""

    __slots__ = ("calls", "lengths")
    __init__, __call__ = Counting.__init__, Counting.__call__


class Automaton:
    """Behind every third token of its own choice come 5, 6 and 7; it counts from the first of its text.

    Nothing of it changes until a token is one of its choice, which the prompts' last tokens are not.
    """

    def __init__(self, choice=frozenset(range(8, 40))):
        self.choice, self.due = choice, {}

    def __call__(self, ids, scores):
        assert ids.shape[0] == scores.shape[0]
        for row, last in enumerate(ids[:, -1].tolist()):
            due = self.due.get(row, [])
            if due:
                assert last == due[0] or len(due) == 3, "text that it forbade"
                self.due[row] = due = due[1:] if last == due[0] else due
            elif last in self.choice:
                self.due[row] = due = [5, 6, 7]
            if due:
                scores[row] = torch.where(torch.arange(scores.shape[1]) == due[0], scores[row], -torch.inf)
        return scores


class Frequencies:
    """Penalises tokens by counts that it keeps in place, one row of them for each row of the batch."""

    def __init__(self):
        self.counts = None

    def __call__(self, ids, scores):
        if self.counts is None:
            self.counts = torch.zeros_like(scores)
        self.counts.scatter_add_(1, ids[:, -1:], torch.ones(len(ids), 1))
        return scores - self.counts


class PerRow:
    """Has a setting, and a state, for each row of the batch; the settings tell from the second call on."""

    def __init__(self, steps):
        self.steps, self.calls = steps, -1

    def __call__(self, ids, scores):
        self.calls += 1
        state = [step * self.calls for step in self.steps]
        return torch.stack([row.roll(state[i] % 5) for i, row in enumerate(scores)])


class Bound:
    def __init__(self):
        self.inner = Counting()

    def process(self, ids, scores):
        return self.inner(ids, scores)


MAKERS = {
    "counting": Counting,
    "slots": Slotted,
    "automaton": Automaton,
    "tensor": Frequencies,
    "bound method": lambda: Bound().process,
    "partial": lambda: functools.partial(Counting()),
    "random": lambda: Noisy(),
}


class Noisy:
    def __init__(self):
        self.generator = torch.Generator().manual_seed(3)

    def __call__(self, ids, scores):
        return scores + 3 * torch.randn(scores.shape[1], generator=self.generator)


def rows_alone(target, prompts, make, **options):
    """Plain texts of the rows, one at a time but padded as in the batch, each with a processor of its own."""
    rows = []
    for index in range(len(prompts.input_ids)):
        inputs = {name: value[index : index + 1] for name, value in prompts.inputs.items()}
        rows.append(target.generate(**inputs, **GREEDY | options, logits_processor=make(index)))
    return torch.cat(rows)


@pytest.mark.parametrize("lengths", LENGTHS, ids=("one row", "batch"))
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("source", ("draft", "lookup"))
def test_equals_plain_rows(pair, name, lengths, source):
    target, draft = pair
    prompts = tiny.ragged_prompts(lengths)
    drafting = {"assistant_model": draft} if source == "draft" else {"prompt_lookup_num_tokens": 3}
    expected = rows_alone(target, prompts, lambda row: [MAKERS[name]()])
    output = target.generate(
        **prompts.inputs,
        **GREEDY,
        **drafting,
        cactus_delta=1.0,
        logits_processor=[MAKERS[name]()],
        return_dict_in_generate=True,
    )
    assert torch.equal(output.sequences, expected)
    if source == "draft":
        assert output.speculation.drafted.sum() > output.speculation.accepted.sum() > 0


def test_the_users_own_object_ends_as_after_plain_generation(pair):
    target, draft = pair
    prompt = tiny.ragged_prompts((5,)).inputs
    plain, ours = Counting(), Counting()
    text = target.generate(**prompt, **GREEDY, logits_processor=[plain])
    kept = ours.lengths
    for end in (None, int(text[0, 14])):
        plain.__init__()
        ours.calls, ours.lengths[:] = 0, []
        options = GREEDY | {"eos_token_id": end}
        target.generate(**prompt, **options, logits_processor=[plain])
        target.generate(**prompt, **options, logits_processor=[ours], assistant_model=draft, cactus_delta=1.0)
        assert ours.lengths == plain.lengths and ours.calls == plain.calls
    assert ours.lengths is kept, "what the user holds of it is what was written to"


def test_in_a_batch_the_users_own_object_is_left_alone(pair):
    target, draft = pair
    processor = Counting()
    call = {**tiny.ragged_prompts().inputs, **GREEDY, "assistant_model": draft, "cactus_delta": 1.0}
    target.generate(**call, logits_processor=[processor])
    assert processor.calls == 0


def test_one_that_remembers_nothing_stays_shared_by_the_rows(pair):
    class Bias:
        calls = []

        def __init__(self):
            self.bias = 4 * torch.randn(4, tiny.VOCAB)

        def __call__(self, ids, scores):
            self.calls.append(len(ids))
            return scores + self.bias

    target, draft = pair
    prompts, processor = tiny.ragged_prompts((6, 6, 6, 6)), Bias()
    call = {**prompts.inputs, **GREEDY, "logits_processor": [processor]}
    plain = target.generate(**call)
    assert torch.equal(target.generate(**call, assistant_model=draft, cactus_delta=1.0), plain)
    assert set(Bias.calls) == {4}


def test_values_for_each_row_meet_that_row(pair):
    target, draft = pair
    prompts, steps = tiny.ragged_prompts(), [1, 2, 3, 4]
    call = {**prompts.inputs, **GREEDY}
    plain = target.generate(**call, logits_processor=[PerRow(steps)])
    ours = target.generate(**call, logits_processor=[PerRow(steps)], assistant_model=draft, cactus_delta=1.0)
    assert torch.equal(ours, plain)


@pytest.mark.parametrize("lengths", LENGTHS, ids=("one row", "batch"))
@pytest.mark.parametrize(
    "options",
    (
        {"watermarking_config": SYNTH_ID},
        {"guidance_scale": 1.7},
        {"guidance_scale": 1.7, "negative_prompt_ids": [7, 8, 9]},
        {"guidance_scale": 0.5, "negative_prompt_ids": [7, 8, 9], "negative_prompt_attention_mask": [0, 1, 1]},
    ),
    ids=lambda options: "-".join(options),
)
def test_transformers_own(pair, options, lengths):
    target, draft = pair
    each = {
        name: torch.tensor([value] * len(lengths)) if isinstance(value, list) else value
        for name, value in options.items()
    }
    call = {**tiny.ragged_prompts(lengths).inputs, **GREEDY, **each}
    plain = target.generate(**call)
    assert torch.equal(target.generate(**call, assistant_model=draft, cactus_delta=1.0), plain)


def test_lists_of_processors(pair):
    target, draft = pair
    prompts = tiny.ragged_prompts()
    nested = LogitsProcessorList([LogitsProcessorList([Counting(), Automaton()]), lambda ids, scores: scores / 2])
    expected = rows_alone(target, prompts, lambda row: [Counting(), Automaton(), lambda ids, scores: scores / 2])
    ours = target.generate(
        **prompts.inputs, **GREEDY, logits_processor=nested, assistant_model=draft, cactus_delta=1.0
    )
    assert torch.equal(ours, expected)


class TestSampling:
    @pytest.mark.parametrize("lengths", LENGTHS, ids=("one row", "batch"))
    @pytest.mark.parametrize("delta", (0.0, 2.0))
    def test_never_leaves_the_language(self, pair, lengths, delta):
        target, draft = pair
        output = target.generate(
            **tiny.ragged_prompts(lengths).inputs,
            **GREEDY | {"do_sample": True, "max_new_tokens": 40},
            logits_processor=[Automaton()],
            assistant_model=draft,
            cactus_delta=delta,
        )
        for text in output[:, max(lengths) - 1 :].tolist():
            check, scores = Automaton(), torch.zeros(1, tiny.VOCAB)
            for end in range(1, len(text)):
                allowed = check(torch.tensor([text[:end]]), scores.clone())
                assert allowed[0, text[end]] == 0

    def test_scores_are_those_of_the_committed_calls(self, pair):
        target, draft = pair
        prompt = tiny.ragged_prompts((5,)).inputs
        options = GREEDY | {"do_sample": True, "return_dict_in_generate": True, "output_scores": True, "top_k": 0}
        output = target.generate(
            **prompt,
            **options,
            output_logits=True,
            logits_processor=[Counting()],
            assistant_model=draft,
            cactus_delta=0.5,
        )
        for call, (scores, logits) in enumerate(zip(output.scores, output.logits, strict=True), start=1):
            assert torch.equal(scores, logits.roll(call % 5, -1))


class Summing:
    """Moves the scores by the sum of the tokens of a row, to which it adds the last one at each call."""

    def __init__(self):
        self.sum = None

    def __call__(self, ids, scores):
        self.sum = ids.sum(1) if self.sum is None else self.sum + ids[:, -1]
        columns = (torch.arange(scores.shape[1]) - self.sum[:, None]) % scores.shape[1]
        return scores.gather(1, columns)


class TestLaw:
    """Seeds were fixed beforehand."""

    @pytest.fixture
    def target(self):
        yield cactus_hf.enable(tiny.vocabulary8(0))
        cactus_hf.disable(tiny.vocabulary8(0))

    def law_of(self, seed, is_moved=True):
        model = tiny.vocabulary8(seed, dtype=torch.float64)

        @torch.no_grad()
        def law(text):
            return model(torch.tensor([text])).logits[0, -1].roll(sum(text) if is_moved else 0).softmax(-1)

        return law

    @pytest.mark.parametrize("delta", (0.0, 0.5))
    def test_rows_of_a_batch(self, target, delta):
        counts = sum(
            laws.frequencies(
                target,
                1,
                assistant_model=tiny.vocabulary8(1),
                cactus_delta=delta,
                num_assistant_tokens=2,
                logits_processor=[Summing()],
            )
            for _ in range(8)
        )
        laws.assert_follows(counts, laws.exact(self.law_of(0), self.law_of(1), cactus_hf.Cactus(delta), 2))
        with pytest.raises(AssertionError):
            other = laws.exact(self.law_of(0, False), self.law_of(1, False), cactus_hf.Cactus(delta), 2)
            laws.assert_follows(counts, other)


class TestRefused:
    """Before any forward pass."""

    @pytest.fixture
    def call(self, pair, monkeypatch):
        target, draft = pair
        for model in (target, draft):
            monkeypatch.setattr(type(model), "__call__", lambda *args, **kwargs: pytest.fail("a forward pass ran"))

        def generate(processor, lengths=(5,)):
            return target.generate(
                **tiny.ragged_prompts(lengths).inputs,
                **GREEDY,
                logits_processor=[processor],
                assistant_model=draft,
                cactus_delta=1.0,
            )

        return generate

    def test_what_cannot_be_copied(self, call):
        processor = Counting()
        processor.stream = (i for i in range(9))
        with pytest.raises(ValueError, match="Counting cannot be copied.*generator.*__deepcopy__"):
            call(processor)
        assert processor.calls == 0

    def test_what_takes_no_single_row(self, call):
        class Insists(Counting):
            def __call__(self, ids, scores):
                assert len(ids) == 4
                return super().__call__(ids, scores)

        with pytest.raises(ValueError, match="Insists.*4 rows.*takes no single row.*row by row"):
            call(Insists(), (5, 17, 9, 2))

    def test_what_mixes_its_rows(self, call):
        class Mixes(Counting):
            def __call__(self, ids, scores):
                super().__call__(ids, scores)
                return scores + ids.float().mean()

        with pytest.raises(ValueError, match="Mixes.*something else.*row by row"):
            call(Mixes(), (5, 17, 9, 2))


class TestExceptions:
    def test_its_own_exception_is_raised_at_the_same_place(self, pair):
        class Stops(Counting):
            def __call__(self, ids, scores):
                scores = super().__call__(ids, scores)
                if self.calls == 12:
                    raise RuntimeError(f"at {ids.tolist()}")
                return scores

        target, draft = pair
        prompt, messages = tiny.ragged_prompts((5,)).inputs, []
        for options in ({}, {"assistant_model": draft, "cactus_delta": 1.0}):
            processor = Stops()
            with pytest.raises(RuntimeError, match="at ") as error:
                target.generate(**prompt, **GREEDY, logits_processor=[processor], **options)
            messages.append(str(error.value))
            assert processor.calls == 12
        assert messages[0] == messages[1]

    def test_a_call_after_one_that_failed(self, pair):
        target, draft = pair
        prompts = tiny.ragged_prompts((5,))
        call = {**prompts.inputs, **GREEDY, "assistant_model": draft, "cactus_delta": 1.0}
        broken = types.SimpleNamespace(put=lambda tokens: 1 / 0, end=lambda: None)
        with pytest.raises(ZeroDivisionError):
            target.generate(**call, logits_processor=[Counting()], streamer=broken)
        expected = rows_alone(target, prompts, lambda row: [Counting()])
        assert torch.equal(target.generate(**call, logits_processor=[Counting()]), expected)


class TestDraftsThatItDoesNotTake:
    """A processor may raise on text that it forbade, or behind an end: plain decoding shows it neither."""

    END = 72

    def allowed(self, width, is_shown_ends):
        """New tokens rise by one to nine until an end; transformers raises where nothing is allowed."""

        def function(row, text):
            new = text[width:].tolist()
            has_ended = any(token >= self.END for token in new)
            if has_ended and is_shown_ends:
                return [tiny.PAD]
            if has_ended or any(not 1 <= b - a <= 9 for a, b in zip(new, new[1:], strict=False)):
                return []
            return range(new[-1] + 1, new[-1] + 10) if new else range(5, 15)

        return function

    @pytest.mark.parametrize("lengths", ((17,), (5, 17, 9, 2)), ids=("one row", "batch"))
    @pytest.mark.parametrize("source", ("draft", "lookup"))
    def test_prefix_function(self, pair, lengths, source):
        target, draft = pair
        prompts = tiny.ragged_prompts(lengths)
        prompts.input_ids[:, -2:] = torch.tensor([10, 30])  # looked up, and forbidden
        # In a batch plain decoding asks about rows that have ended, too
        call = {"prefix_allowed_tokens_fn": self.allowed(17, is_shown_ends=len(lengths) > 1)}
        call |= {**prompts.inputs, **GREEDY, "eos_token_id": list(range(self.END, tiny.VOCAB)), "max_new_tokens": 30}
        plain = target.generate(**call)
        drafting = {"assistant_model": draft} if source == "draft" else {"prompt_lookup_num_tokens": 3}
        ours = target.generate(**call, **drafting, num_assistant_tokens=9, cactus_delta=1.0)
        assert torch.equal(ours, plain)

    @pytest.mark.parametrize("lengths", LENGTHS, ids=("one row", "batch"))
    def test_the_text_comes_to_it(self, pair, lengths):
        """A function that raises at the tenth token raises, drafts or none."""

        def raising(ids, scores):
            if ids.shape[1] == max(lengths) + 9:
                raise KeyError(ids[:, :-1].tolist())
            return scores

        target, draft = pair
        call = {**tiny.ragged_prompts(lengths).inputs, **GREEDY, "logits_processor": [raising]}
        for drafting in ({}, {"assistant_model": draft, "cactus_delta": 1.0}):
            with pytest.raises(KeyError):
                target.generate(**call, **drafting)
        call |= {"max_new_tokens": 9}
        assert torch.equal(target.generate(**call, **drafting), target.generate(**call))

    def test_prefix_functions_of_rows_that_share_nothing(self, pair):
        """Each row has a language of its own, and raises at the others' texts."""

        def function(row, text):
            own = list(range(12 * (row + 1), 12 * (row + 2)))
            return own if all(token in [*own, tiny.PAD] for token in text[17:].tolist()) else []

        target, draft = pair
        prompts = tiny.ragged_prompts((9, 17, 5))
        call = {**prompts.inputs, **GREEDY, "prefix_allowed_tokens_fn": function}
        assert torch.equal(target.generate(**call, assistant_model=draft, cactus_delta=1.0), target.generate(**call))
        call |= {"do_sample": True, "num_return_sequences": 2}
        languages = []
        for drafting in ({}, {"assistant_model": draft, "cactus_delta": 1.0}):
            rows = target.generate(**call, **drafting)[:, 17:].tolist()
            languages.append([{token // 12 - 1 for token in text} for text in rows])
        assert languages[0] == languages[1] and all(len(language) == 1 for language in languages[0])
