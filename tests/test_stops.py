"""Nothing behind a stop is returned, counted or left in the cache, wherever in a block of drafts the stop falls."""

from __future__ import annotations

import string
import time

import pytest
import torch
from torch import Tensor
from transformers import MaxLengthCriteria, StoppingCriteria, StoppingCriteriaList

import cactus_hf
import tiny
from cactus_hf import TokenKind
from cactus_hf.counters import Recorder
from cactus_hf.host import CACHE_NAME


NEW = 24
LENGTHS = ((17,), (5, 17, 9))
CALL = {"max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": tiny.PAD, "return_dict_in_generate": True}
COUNTS = ("drafted", "verified", "accepted", "emitted", "rounds", "accepted_by_position", "kinds")
SUMS = ("ball_kl_sum", "emitted_kl_sum", "emitted_tv_sum")


@pytest.fixture(scope="module")
def tokenizer():
    return tiny.byte_tokenizer()


@pytest.fixture(scope="module")
def pair(tokenizer):
    target = tiny.ARCHITECTURES["llama"].build(vocab=len(tokenizer), dtype=torch.float64)
    return cactus_hf.enable(target), tiny.perturbed(target, 0.1)


class Sampled:
    """A seeded call without any stop, and what each of its rounds was."""

    def __init__(self, pair, lengths, tokenizer):
        self.target, self.draft = pair
        self.prompts, self.width = tiny.ragged_prompts(lengths, vocab=self.target.config.vocab_size), max(lengths)
        self.rounds: list[list] = [[] for _ in lengths]
        stock = Recorder.add

        def add(recorder, round):
            for b, row in enumerate(round.rows.tolist()):
                self.rounds[row].append(type(round)(*(x[:, b] if x.dim() == 3 else x[b] for x in round)))
            stock(recorder, round)

        letters = tokenizer.convert_tokens_to_ids(list(string.ascii_letters))
        self.suppressed = sorted(set(range(len(tokenizer))) - set(letters))  # other bytes are no text by themselves
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Recorder, "add", add)
            self.output = self()
        self.text = self.output.sequences[:, self.width :]

    def __call__(self, **options):
        seeds = list(range(1, len(self.rounds) + 1))
        fixed = {"do_sample": True, "cactus_delta": 0.5, "speculation_kl": True, "num_assistant_tokens": 4}
        fixed["suppress_tokens"] = self.suppressed
        return self.target.generate(
            **self.prompts.inputs, **CALL | fixed | options, assistant_model=self.draft, generator=seeds
        )

    def stats_of(self, row: int, length: int) -> dict[str, Tensor]:
        """What `.speculation` must say of a row that ends behind `length` tokens, by the rounds of the whole text."""
        accepted_at = torch.zeros(4, dtype=torch.long)
        counts = dict.fromkeys(("drafted", "verified", "accepted", "rounds"), 0)
        kinds, sums, emitted = [int(TokenKind.FIRST)], torch.zeros(3, dtype=torch.float64), 1
        for round in self.rounds[row]:
            if emitted >= length:
                break
            left = min(int(round.num_emitted), length - emitted)
            is_last = emitted + left == length
            num_accepted, num_drafted = int(round.num_accepted), int(round.num_drafted)
            for place in range(left):
                is_draft, is_kept = place < num_drafted, place < num_accepted
                counts["verified"] += is_draft
                counts["accepted"] += is_kept
                accepted_at[place : place + 1] += is_kept
                sums += round.divergence[:, place] if is_draft else 0
                kind = TokenKind.EXTRA if num_accepted == num_drafted else TokenKind.REPLACED
                if is_kept:
                    kind = TokenKind.BOOSTED if round.is_boosted[place] else TokenKind.ACCEPTED
                kinds.append(int(kind))
            counts["drafted"] += min(left, num_drafted) if is_last else num_drafted
            counts["rounds"] += 1
            emitted += left
        stats = {name: torch.tensor(value) for name, value in counts.items()} | {"emitted": torch.tensor(length)}
        return (
            stats
            | {"accepted_by_position": accepted_at, "kinds": torch.tensor(kinds)}
            | dict(zip(SUMS, sums, strict=True))
        )

    def check(self, output, lengths: list[int]) -> None:
        """The output is that of the whole texts, cut to these lengths."""
        stats, new = output.speculation, output.sequences[:, self.width :]
        assert new.shape[1] == max(lengths) == stats.kinds.shape[1]
        for row, length in enumerate(lengths):
            assert torch.equal(new[row, :length], self.text[row, :length])
            assert (new[row, length:] == tiny.PAD).all()
            expected = self.stats_of(row, length)
            assert expected.pop("kinds").tolist() == [k for k in stats.kinds[row].tolist() if k != TokenKind.PAD]
            by_position = expected.pop("accepted_by_position")[: stats.accepted_by_position.shape[1]]
            assert by_position.tolist() == stats.accepted_by_position[row].tolist()
            assert not (set(COUNTS) - expected.keys()) - {"kinds", "accepted_by_position"}
            for name, value in expected.items():
                torch.testing.assert_close(getattr(stats, name)[row], value)


@pytest.fixture(scope="module")
def one_row(pair, tokenizer):
    return Sampled(pair, LENGTHS[0], tokenizer)


@pytest.fixture(scope="module")
def batch(pair, tokenizer):
    return Sampled(pair, LENGTHS[1], tokenizer)


@pytest.fixture(params=("one_row", "batch"))
def sampled(request):
    return request.getfixturevalue(request.param)


def first(text: Tensor, is_stop) -> list[int]:
    """Length of each row up to and including the first token that stops it."""
    return [next((i + 1 for i, token in enumerate(row) if is_stop(token)), len(row)) for row in text.tolist()]


PLACES = (0, 1, 2, 3, 5, 6, 9, 12)


def test_the_places_are_of_all_kinds(batch):
    assert set(batch.output.speculation.kinds[0, PLACES].tolist()) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("place", PLACES)
class TestEveryPlace:
    def test_ends(self, sampled, place):
        ends = sorted({int(row[place]) for row in sampled.text})
        lengths = first(sampled.text, lambda token: token in ends)
        sampled.check(sampled(eos_token_id=ends), lengths)

    def test_criteria(self, sampled, place):
        limits = [sampled.width + place + 1 + row for row in range(len(sampled.text))]

        def criterion(ids, scores, **_):
            return torch.tensor([ids.shape[1] >= limit for limit in limits])

        output = sampled(stopping_criteria=StoppingCriteriaList([criterion]))
        sampled.check(output, [limit - sampled.width for limit in limits])

    @pytest.mark.parametrize("by", ("option", "criterion"))
    def test_lengths(self, sampled, place, by):
        """The last rounds draft less then, so that the text may be another."""
        criteria = [MaxLengthCriteria(sampled.width + place + 1)]
        output = sampled(**{"max_new_tokens": place + 1} if by == "option" else {"stopping_criteria": criteria})
        assert output.sequences.shape[1] == sampled.width + place + 1
        assert output.speculation.emitted.tolist() == [place + 1] * len(sampled.text)
        assert torch.equal(output.sequences[:, sampled.width], sampled.text[:, 0])

    def test_stop_strings(self, sampled, tokenizer, place):
        word = tokenizer.decode(sampled.text[0, place : place + 1])
        lengths = first(sampled.text, lambda token: tokenizer.decode([token]) == word)
        sampled.check(sampled(stop_strings=word, tokenizer=tokenizer), lengths)


def test_the_first_of_several_stops_counts(sampled):
    end = int(sampled.text[0, 9])
    lengths = [min(n, 12) for n in first(sampled.text, lambda token: token == end)]
    criteria = StoppingCriteriaList([lambda ids, scores, **_: ids.shape[1] >= sampled.width + 12])
    sampled.check(sampled(eos_token_id=end, stopping_criteria=criteria, max_time=1e6), lengths)


def test_max_time_stops_behind_the_next_token(sampled, monkeypatch):
    start, calls = time.time(), iter(range(10**6))
    monkeypatch.setattr(time, "time", lambda: start + next(calls))
    output = sampled(max_time=7.5)
    assert 1 < output.sequences.shape[1] - sampled.width < NEW
    assert (output.speculation.emitted > 0).all()


def test_the_cache_ends_where_the_text_ends(sampled):
    """The next turn, on the cache returned, is that of the text alone."""
    ends = sorted({int(sampled.text[0, 8])})
    output = sampled(eos_token_id=ends)
    length = output.sequences.shape[1]
    assert output[CACHE_NAME].get_seq_length() == length - 1
    is_text = torch.arange(length - sampled.width) < output.speculation.emitted[:, None]
    ids = torch.nn.functional.pad(output.sequences, (0, 3), value=50)
    mask = torch.cat([sampled.prompts.attention_mask, is_text.long(), torch.ones(len(ids), 3).long()], 1)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": tiny.PAD}
    with_cache = sampled.target.generate(ids, attention_mask=mask, **options, **{CACHE_NAME: output[CACHE_NAME]})
    assert torch.equal(with_cache, sampled.target.generate(ids, attention_mask=mask, **options))


class Counting(StoppingCriteria):
    """Stops a row at the token that is its `limit`-th call, whatever the text."""

    def __init__(self, limit):
        self.limit, self.calls = limit, 0

    def __call__(self, input_ids, scores, **kwargs):
        self.calls += 1
        return torch.full((len(input_ids),), self.calls >= self.limit)


class Repeats(StoppingCriteria):
    """Stops a row at its third token of a kind, which it remembers for each row."""

    def __init__(self, kind):
        self.kind, self.seen = kind, {}

    def __call__(self, input_ids, scores, **kwargs):
        for row, token in enumerate(input_ids[:, -1].tolist()):
            if self.kind(token):
                self.seen[row] = self.seen.get(row, 0) + 1
        return torch.tensor([self.seen.get(row, 0) >= 3 for row in range(len(input_ids))])


class PerRow(StoppingCriteria):
    def __init__(self, limits):
        self.left = list(limits)

    def __call__(self, input_ids, scores, **kwargs):
        self.left = [left - 1 for left in self.left]
        return torch.tensor([left <= 0 for left in self.left])


class TestCriteriaThatRemember:
    @pytest.mark.parametrize("limit", (1, 2, 7, 13))
    def test_counting(self, sampled, limit):
        sampled.check(sampled(stopping_criteria=[Counting(limit)]), [limit] * len(sampled.text))

    @pytest.mark.parametrize("is_late", (False, True), ids=("from the prompt on", "later"))
    def test_what_each_row_had(self, sampled, is_late):
        """If the prompts end in other tokens, then nothing shows beforehand that it remembers."""
        prompts = sampled.prompts.input_ids[:, -1].tolist()
        kind = {token for row in sampled.text.tolist() for token in row if token % 2 == 0}
        kind = kind - set(prompts) if is_late else kind | set(prompts)
        lengths = [[i + 1 for i, token in enumerate(row) if token in kind][2] for row in sampled.text.tolist()]
        assert 1 < min(lengths) and max(lengths) < NEW
        sampled.check(sampled(stopping_criteria=[Repeats(kind.__contains__)]), lengths)

    def test_a_value_for_each_row(self, sampled):
        limits = [4, 11, 7][: len(sampled.text)]
        sampled.check(sampled(stopping_criteria=[PerRow(limits)]), limits)

    def test_one_row_has_the_users_own(self, one_row):
        sampled, criterion = one_row, Counting(9)
        sampled(stopping_criteria=[criterion])
        assert criterion.calls == 9
        criterion = Counting(99)
        sampled(stopping_criteria=[criterion])
        assert criterion.calls == NEW

    def test_one_that_cannot_be_copied_is_refused(self, pair):
        target, draft = pair
        criterion = Counting(5)
        criterion.stream = (i for i in range(3))
        call = {"do_sample": False, "assistant_model": draft, "cactus_delta": 1.0, "stopping_criteria": [criterion]}
        with pytest.raises(ValueError, match="Counting cannot be copied"):
            target.generate(**tiny.ragged_prompts().inputs, **CALL, **call)
        target.generate(**tiny.ragged_prompts((5,)).inputs, **CALL, **call)  # a single row needs no copy
        assert criterion.calls == 5


class Confident(StoppingCriteria):
    """Looks at the scores, as transformers' documentation offers; remembers how many it was shown."""

    def __init__(self):
        self.shown = []

    def __call__(self, input_ids, scores, **kwargs):
        self.shown.append(scores if scores is None else len(scores))
        if scores is None:
            return False
        chosen = scores[-1].softmax(-1).gather(1, input_ids[:, -1:])[:, 0]
        return (chosen > 0.9) & (len(scores) > 5)


class TestScoresForCriteria:
    def test_of_the_text_so_far(self, sampled):
        output = sampled(output_scores=True)
        chance = torch.stack(output.scores, 1).softmax(-1).gather(2, sampled.text[..., None])[..., 0]
        lengths = [next((i + 1 for i in range(5, NEW) if row[i] > 0.9), NEW) for row in chance]
        assert max(lengths) < NEW
        for remembers in (False, True):
            criterion = Confident() if remembers else (lambda ids, scores, **_: Confident()(ids, scores))
            stopped = sampled(output_scores=True, stopping_criteria=[criterion])
            sampled.check(stopped, lengths)
            assert len(stopped.scores) == max(lengths)
            for row, length in enumerate(lengths):
                for i, scores in enumerate(stopped.scores):
                    expected = output.scores[i][row] if i < length else torch.zeros_like(scores[row])
                    torch.testing.assert_close(scores[row], expected.to(scores))

    def test_none_if_they_are_not_asked_for(self, one_row):
        sampled, criterion = one_row, Confident()
        sampled(stopping_criteria=[criterion])
        assert set(criterion.shown) == {None}
        criterion = Confident()
        sampled(stopping_criteria=[criterion], output_scores=True)
        assert criterion.shown == list(range(1, len(criterion.shown) + 1))
