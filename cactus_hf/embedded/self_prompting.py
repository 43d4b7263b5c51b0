"""Training text for the draft, sampled from the target: prompts, its own or others', and its answers.

An instruction-tuned model that is given its own chat template up to the user's turn writes a user's question (Xu et
al., "Magpie", arXiv 2406.08464). That needs no data set, and covers what the model was tuned on. Part of the questions
start from a given opening word or two, because left alone a small model asks much the same things. Answers are drawn
at the temperature the draft is meant for.

Every row of a wave sits at the same cache slot; a row whose conversation ends starts the next one at the following
slot, hidden from the earlier slots except the shared prefix. Nothing is padded and no row waits.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .lean_decoder import LeanDecoder
from .options import option
from .written_prompts import written_prompts


GIVEN, QUESTION, ANSWER = 0, 1, 2  # kinds of token: not sampled, sampled question, sampled answer

OPENINGS = (
    """
Write|Write a|Write a short|Write an email|Write a story about|Write a poem about|Write a Python function|Write a
blog post|Write a program|Compose|Compose a|Draft a|Draft an email|Create a|Design a|Describe|Describe a|Describe
the|Explain|Explain how|Explain why|Explain the difference between|Explain what|Explain to a|What is|What is the|What
are|What are the|What would|How do|How does|How can|How would you|How many|Why|Why do|Why is|When|Who|Which|Where|Can
you|Can you explain|Could you|Please|Give me|Give an example|List|List the|Name|Compare|Compare and
contrast|Summarize|Rewrite|Rewrite the following|Translate|Edit|Correct|Classify|Identify|Extract|Extract
the|Given|Given the following|Given a|Based on|Read the following|Here is|Consider|Consider a|Suppose|Suppose
you|Imagine|Imagine you are|Pretend|Pretend to be|You are|You are a|Act as|Act as a|Assume the role of|Let's|If|If
a|If I|In|In the|A|A man|A train|The|The following|There are|Two|Three|Find|Find the|Solve|Solve the
equation|Calculate|Compute|Evaluate|Determine|Prove|Simplify|Implement|Implement
a|Develop|Build|Debug|What's|Analyze|Analyze the|Discuss|Discuss the|Outline|Provide|Provide a|Suggest|Recommend|Help
me|I am|I have|I want|I need|My|Is|Is it|Are|Do|Does|Should|Tell me|Tell me
about|Generate|Convert|Plan|Propose|Argue|Critique|Review|Evaluate the following|Complete|Fill
in|Choose|Select|Answer|Think|Take|Make|Use|Using|From|For|At|On|One|Some|Many|Every|During|After|Before
""".strip()
    .replace("\n", " ")
    .split("|")
)


@dataclass
class Conversation:
    """One row's state while its text is written."""

    start: int  # slot of its first token
    forced: list[int]  # tokens still to be fed as they are
    kind: int  # of the tokens sampled next
    room: int  # tokens that kind may still take
    tokens: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)


class Sample(NamedTuple):
    """One finished conversation after the prefix. Letters: T tokens, H hidden size."""

    tokens: Tensor  # int64 [T]
    kinds: Tensor  # uint8 [T]
    hidden: Tensor  # float16 [T, H], the target's final hidden state after each token


@dataclass(frozen=True)
class Template:
    """The chat template in pieces, as tokens.

    Args:
        prefix (`list[int]`): all that comes before the user's text.
        turn (`list[int]`): between the user's text and the answer.
        stop (`int`): the token that ends either.
    """

    prefix: list[int]
    turn: list[int]
    stop: int

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> Template:
        """Reads the pieces off the tokenizer's own chat template."""
        mark = "\x02"
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": mark}], add_generation_prompt=True, tokenize=False
        )
        before, after = text.split(mark)
        prefix, turn = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in (before, after))
        return cls(prefix, turn, tokenizer.eos_token_id)


@dataclass(frozen=True)
class SamplingConfig:
    """Options of sampling (`cactus-hf distill sample --help`)."""

    given_share: float = option(0.15, "share of conversations that take a given prompt, if there are any")
    written_share: float = option(0.35, "share that take a prompt put together from templates")
    opening_share: float = option(0.3, "share whose question starts from a given word; the rest are free")
    temperature: float = option(0.7, "of the answers")
    question_temperature: float = option(0.8, "of the target's own questions")
    answer_len: int = option(128, "most tokens of an answer")
    question_len: int = option(160, "most tokens of a question")
    batch: int = option(128, "rows sampled together")
    slots: int = option(320, "cache slots of a wave; one shard is one wave")


class SelfPrompting:
    """Conversations sampled from the target.

    Args:
        model (`PreTrainedModel`): the target.
        tokenizer (`PreTrainedTokenizerBase`): its tokenizer, with a chat template.
        prompts (`list[str]`): given prompts; may be empty.
        config (`SamplingConfig`): the options.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        prompts: list[str],
        config: SamplingConfig,
    ):
        self.tokenizer, self.prompts, self.config = tokenizer, prompts, config
        self.template = Template.of(tokenizer)
        self.temperatures = torch.tensor([config.temperature, config.question_temperature, config.temperature])
        self.decoder = LeanDecoder(model, config.batch, config.slots)
        self.chooser, self.written = random.Random(), written_prompts()
        self.generator = torch.Generator()

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def begin(self, slot: int) -> Conversation:
        config, draw = self.config, self.chooser.random()
        given = config.given_share if self.prompts else 0.0
        written = given + config.written_share
        if draw < written:
            prompt = self.chooser.choice(self.prompts) if draw < given else next(self.written)
            forced = self.encode(prompt)[: config.question_len] + self.template.turn
            return Conversation(slot, forced, ANSWER, config.answer_len)
        opening = self.encode(self.chooser.choice(OPENINGS)) if draw < written + config.opening_share else []
        return Conversation(slot, opening, QUESTION, config.question_len)

    def wave(self, seed: int) -> Iterator[Sample]:
        """Fills the cache once, yielding conversations as they end and, last, those cut off inside their answer."""
        self.chooser.seed(seed)
        self.written = written_prompts(seed)
        self.generator.manual_seed(seed)
        decoder, prefix = self.decoder, self.template.prefix
        decoder.start(prefix)
        rows = [self.begin(len(prefix)) for _ in range(decoder.batch)]
        starts = torch.full((decoder.batch,), len(prefix))
        slots = torch.arange(decoder.slots)
        memory = torch.zeros(decoder.slots, decoder.batch, decoder.hidden_size, dtype=torch.float16)
        next_tokens = [0] * decoder.batch
        # The first free question token needs a law before any step: that of the prefix itself.
        first_law = decoder.first_logits.expand(decoder.batch, -1)
        fresh = self.draw(first_law, torch.full((decoder.batch,), QUESTION))
        for slot in range(len(prefix), decoder.slots):
            for row, state in enumerate(rows):
                if state.start == slot and not state.forced:
                    next_tokens[row] = int(fresh[row])
                forced = bool(state.forced)
                token = state.forced.pop(0) if forced else next_tokens[row]
                state.tokens.append(token)
                state.kinds.append(GIVEN if forced else state.kind)
            tokens = torch.tensor([state.tokens[-1] for state in rows])
            is_hidden = (slots[: slot + 1] < starts[:, None]) & (slots[: slot + 1] >= len(prefix))
            hidden = decoder.step(tokens, len(prefix) + slot - starts, slot, is_hidden)
            memory[slot] = hidden.half()
            next_tokens = self.draw(decoder.head(hidden), torch.tensor([state.kind for state in rows])).tolist()
            for row, state in enumerate(rows):
                if state.forced or state.kinds[-1] != state.kind:
                    continue
                state.room -= 1
                if state.kind == QUESTION and (state.room <= 0 or next_tokens[row] == self.template.stop):
                    state.forced, state.kind, state.room = list(self.template.turn), ANSWER, self.config.answer_len
                elif state.kind == ANSWER and (state.room <= 0 or state.tokens[-1] == self.template.stop):
                    yield self.finish(state, memory, row, slot)
                    rows[row] = self.begin(slot + 1)
                    starts[row] = slot + 1
            if any(state.start == slot + 1 for state in rows):
                fresh = self.draw(first_law, torch.full((decoder.batch,), QUESTION))
        for row, state in enumerate(rows):
            if ANSWER in state.kinds:
                yield self.finish(state, memory, row, decoder.slots - 1)

    def finish(self, state: Conversation, memory: Tensor, row: int, slot: int) -> Sample:
        tokens, kinds = torch.tensor(state.tokens), torch.tensor(state.kinds, dtype=torch.uint8)
        return Sample(tokens, kinds, memory[state.start : slot + 1, row].clone())

    def draw(self, logits: Tensor, kinds: Tensor) -> Tensor:
        """One token a row by inverse CDF, first of a block and then in it: far cheaper than V random numbers."""
        probs = (logits / self.temperatures[kinds][:, None]).softmax(-1)
        width = 256
        probs = torch.nn.functional.pad(probs, (0, -probs.shape[1] % width)).view(len(probs), -1, width)
        blocks = probs.sum(-1).cumsum(-1)
        point = torch.rand(len(probs), 1, generator=self.generator) * blocks[:, -1:] * (1 - 1e-6)
        block = torch.searchsorted(blocks, point, right=True)
        rest = point - torch.cat([torch.zeros_like(blocks[:, :1]), blocks], 1).gather(1, block)
        inside = probs[torch.arange(len(probs)), block[:, 0]].cumsum(-1)
        token = torch.searchsorted(inside, rest.clamp_min(0), right=True).clamp_max(width - 1)
        return (block * width + token)[:, 0]
