"""What holds of every call: greedy text is plain decoding's; sampled text, scores and statistics fit together."""

from __future__ import annotations

import warnings

import pytest
import random_calls as random
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import StopStringCriteria

import cactus_hf
import tiny
from cactus_hf import TokenKind


pytestmark = pytest.mark.filterwarnings("ignore:.*one after another:UserWarning")


def rows_of(prompts: tiny.Prompts, *, padded: bool = True) -> list[tiny.Prompts]:
    """The rows alone, with the padding they have in the batch: processors look at it."""
    if not padded:
        return [prompts.row(index) for index in range(len(prompts.input_ids))]
    return [tiny.Prompts(*(x[index : index + 1] for x in prompts)) for index in range(len(prompts.input_ids))]


def new_tokens(model, prompts: tiny.Prompts, options: random.Options) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(flags are not valid|eos_token_id|pad_token_id|min_length).*")
        output = model.generate(**prompts.inputs, **random.ready({"pad_token_id": tiny.PAD} | options))
    return output[:, prompts.input_ids.shape[1] :]


@random.examples(60)
@given(st.data())
def test_greedy_text_is_that_of_plain_decoding(data):
    name = data.draw(st.sampled_from(random.NAMES))
    target, prompts = random.target(name), data.draw(random.prompts())
    num_rows, width = prompts.input_ids.shape
    processors = data.draw(random.some_of(random.PREFIX_PROCESSORS | random.PROMPT_PROCESSORS))
    room = data.draw(st.integers(1, 20))
    length = {"max_new_tokens": room} if data.draw(st.booleans()) else {"max_length": width + room}
    options = {"do_sample": False, "eos_token_id": tiny.EOS} | processors | length
    rows = rows_of(prompts)
    texts = [new_tokens(target, row, options)[0] for row in rows]
    stops = data.draw(random.stops(texts))
    options |= stops
    texts = [new_tokens(target, row, options)[0] for row in rows]
    source, rule = data.draw(random.sources(name)), data.draw(random.rules(num_rows))
    ours = new_tokens(target, prompts, options | source | rule)
    assert ours.shape[1] == max(map(len, texts))
    for row, text in zip(ours, texts, strict=True):
        assert row[: len(text)].tolist() == text.tolist()
        assert (row[len(text) :] == tiny.PAD).all()


def sampled(target, prompts: tiny.Prompts, options: random.Options):
    """The output of a call that is asked for everything."""
    call = {"do_sample": True, "pad_token_id": tiny.PAD, "top_k": 0, "return_dict_in_generate": True}
    return target.generate(**prompts.inputs, **random.ready(call | {"output_scores": True} | options))


def ends(text: Tensor, width: int, options: random.Options) -> bool:
    """Whether plain decoding would stop behind `text` [columns], the prompt of `width` columns included."""
    if text[-1] in torch.tensor(options["eos_token_id"]) or len(text) - width == options["max_new_tokens"]:
        return True
    if "stop_strings" in options and StopStringCriteria(options["tokenizer"], options["stop_strings"])(
        text[None], None
    ):
        return True
    criterion = random.NthMultiple(options.get("stopping_criteria", tiny.VOCAB))
    return bool([criterion(text[None, :end], None) for end in range(width + 1, len(text) + 1)][-1])


def assert_consistent(output, width: int, options: random.Options) -> None:
    """Text, scores and statistics of a sampled call."""
    stats, text = output.speculation, output.sequences[:, width:]
    assert text.shape[1] == len(output.scores) == stats.kinds.shape[1] == int(stats.emitted.max())
    is_written = torch.arange(text.shape[1]) < stats.emitted[:, None]
    assert (text[~is_written] == tiny.PAD).all() and (stats.kinds[~is_written] == TokenKind.PAD).all()
    for row, count in zip(output.sequences, stats.emitted.tolist(), strict=True):
        assert [ends(row[: width + n], width, options) for n in range(1, count + 1)] == [False] * (count - 1) + [True]
    scores = torch.stack(output.scores, 1).gather(-1, text[..., None])[..., 0]
    is_kept = (stats.kinds == TokenKind.ACCEPTED) | (stats.kinds == TokenKind.BOOSTED)
    if not isinstance(options.get("acceptance_rule"), cactus_hf.Mixture):
        assert scores[is_written].isfinite().all(), "a token that a processor had removed"
    assert (stats.kinds[:, 0] == TokenKind.FIRST).all() and (stats.kinds == TokenKind.FIRST).sum() == len(text)
    is_next = (stats.kinds == TokenKind.REPLACED) | (stats.kinds == TokenKind.EXTRA)
    assert torch.equal(is_kept.sum(1), stats.accepted) and torch.equal(
        stats.accepted_by_position.sum(1), stats.accepted
    )
    assert ((stats.rounds == is_next.sum(1)) | (stats.rounds == is_next.sum(1) + 1)).all()
    assert (stats.drafted >= stats.verified).all() and (stats.verified >= stats.accepted).all()
    assert torch.equal(
        stats.verified - stats.accepted >= (stats.kinds == TokenKind.REPLACED).sum(1), stats.rounds >= 0
    )
    assert (stats.accepted_by_position[:, :-1] >= stats.accepted_by_position[:, 1:]).all()
    assert (stats.ball_kl_sum >= 0).all() and stats.ball_kl_sum.isfinite().all()


def assert_scores_are_plain(target, output, prompts: tiny.Prompts, row: int, options: random.Options) -> None:
    """The scores of a row's last token are those that plain decoding has behind the text before it."""
    last = prompts.input_ids.shape[1] + int(output.speculation.emitted[row]) - 1
    mask = torch.nn.functional.pad(
        prompts.attention_mask[row : row + 1], (0, last - prompts.input_ids.shape[1]), value=1
    )
    names = (*random.WARPERS, *random.PREFIX_PROCESSORS, "eos_token_id")
    plain = target.generate(
        output.sequences[row : row + 1, :last], attention_mask=mask, max_new_tokens=1, do_sample=True,
        output_scores=True, return_dict_in_generate=True, pad_token_id=tiny.PAD,
        **random.ready({"top_k": 0} | {name: options[name] for name in names if name in options}),
    )  # fmt: skip
    ours = output.scores[last - prompts.input_ids.shape[1]][row]
    torch.testing.assert_close(ours.float(), plain.scores[0][0], atol=1e-3, rtol=1e-4)  # plain ones are float32


@random.examples(60)
@given(st.data())
def test_sampled_calls_agree_with_themselves(data):
    name = data.draw(st.sampled_from(random.NAMES))
    target, prompts = random.target(name), data.draw(random.prompts())
    num_rows, width = prompts.input_ids.shape
    processors = data.draw(random.some_of(random.WARPERS)) | data.draw(random.some_of(random.PREFIX_PROCESSORS, 2))
    options = processors | {"max_new_tokens": data.draw(st.integers(1, 20)), "eos_token_id": [tiny.EOS]}
    options |= data.draw(random.stops([torch.arange(5, 25)]))
    if num_rows > 1 or data.draw(st.booleans()):
        options |= {"num_return_sequences": data.draw(st.integers(1, 3))}
    options |= data.draw(random.sources(name)) | data.draw(random.rules(num_rows))
    num_sequences = options.get("num_return_sequences", 1)
    options |= {"generator": data.draw(st.lists(st.integers(), min_size=num_rows, max_size=num_rows))}
    puts: list[Tensor] = []
    if num_rows * num_sequences == 1:
        options |= {"streamer": Collecting(puts)}
    output = sampled(target, prompts, options)
    assert len(output.sequences) == num_rows * num_sequences
    assert torch.equal(output.sequences[:, :width], prompts.input_ids.repeat_interleave(num_sequences, 0))
    assert_consistent(output, width, options)
    if puts:
        assert torch.equal(torch.cat([put.flatten() for put in puts]), output.sequences[0])
    if random.Counting not in processors.get("logits_processor", ()):
        repeated = tiny.Prompts(*(x.repeat_interleave(num_sequences, 0) for x in prompts))
        assert_scores_are_plain(
            target, output, repeated, data.draw(st.integers(0, len(output.sequences) - 1)), options
        )
    if options.get("cactus_delta") == 0:
        assert not (output.speculation.kinds == TokenKind.BOOSTED).any() and output.speculation.ball_kl == 0


class Collecting:
    def __init__(self, puts: list[Tensor]):
        self.put = puts.append

    def end(self) -> None:
        pass


EXACT_KINDS = tuple(kind for kind in random.KINDS if kind != "half")  # whose rounding depends on the batch


@random.examples(40)
@given(st.data())
def test_a_row_with_a_seed_has_the_text_that_it_has_alone(data):
    name = data.draw(st.sampled_from(random.NAMES))
    target, prompts = random.target(name), data.draw(random.prompts())
    num_rows, width = prompts.input_ids.shape
    warpers, looking = (
        data.draw(random.some_of(random.WARPERS)),
        data.draw(random.some_of(random.PREFIX_PROCESSORS, 1)),
    )
    options = warpers | looking | {"max_new_tokens": data.draw(st.integers(1, 20)), "eos_token_id": [tiny.EOS, 7, 8]}
    options |= data.draw(random.sources(name, EXACT_KINDS))
    deltas = data.draw(st.lists(random.DELTAS, min_size=num_rows, max_size=num_rows))
    seeds = data.draw(st.lists(st.integers(), min_size=num_rows, max_size=num_rows))
    batch = sampled(target, prompts, options | {"cactus_delta": deltas, "generator": seeds}).sequences[:, width:]
    for index, row in enumerate(rows_of(prompts, padded=bool(looking))):
        alone = sampled(target, row, options | {"cactus_delta": deltas[index], "generator": seeds[index : index + 1]})
        text = alone.sequences[0, row.input_ids.shape[1] :]
        assert batch[index, : len(text)].tolist() == text.tolist()
        assert (batch[index, len(text) :] == tiny.PAD).all()


@random.examples(25)
@given(st.data())
def test_a_draft_that_is_the_target_is_always_kept(data):
    name = data.draw(st.sampled_from(random.NAMES))
    target, prompts = random.target(name), data.draw(random.prompts())
    processors = data.draw(random.some_of(random.WARPERS)) | data.draw(random.some_of(random.PREFIX_PROCESSORS, 2))
    rule = data.draw(st.sampled_from((cactus_hf.Cactus(0.0), cactus_hf.Cactus(1.0), cactus_hf.Mixture(0.5))))
    length = {"num_assistant_tokens": data.draw(st.integers(1, 9)), "max_new_tokens": 16}
    draft = random.draft(name, data.draw(st.sampled_from(("same", "copy"))))
    call = processors | length | {"assistant_model": draft, "acceptance_rule": rule, "eos_token_id": tiny.EOS}
    stats = sampled(target, prompts, call | {"speculation_kl": True}).speculation
    assert torch.equal(stats.accepted, stats.verified) and stats.emitted_tv < 1e-6
    assert not torch.isin(stats.kinds, torch.tensor([TokenKind.REPLACED, TokenKind.BOOSTED], dtype=torch.int8)).any()
