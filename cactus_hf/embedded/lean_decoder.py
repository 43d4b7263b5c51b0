"""One-token-a-row decoding of a Llama-family target, tuned for sampling training text on a CPU.

`generate()` spends most of its time on a CPU repeating grouped keys, growing the cache and choosing tokens. Here all
rows of a batch sit at the same cache slot (so nothing is padded), the cache is allocated once in bfloat16, query heads
that share a key head are one small matrix product, and the matrix products run in bfloat16 with float32 sums.

Letters: B rows, T cache slots, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache, PreTrainedModel


class LeanDecoder:
    """Lock-step decoder that returns the hidden state the target's head reads.

    Args:
        model (`PreTrainedModel`): a Llama-family causal model without biases in its linear layers.
        batch (`int`): rows B.
        slots (`int`): cache slots T; a wave ends when they are used up.
    """

    def __init__(self, model: PreTrainedModel, batch: int, slots: int):
        config = model.config
        self.body, self.batch, self.slots = model.model, batch, slots
        self.num_heads, self.num_key_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.layers = []
        for layer in self.body.layers:
            attention, mlp = layer.self_attn, layer.mlp
            qkv = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
            gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
            packed = [pack(w) for w in (qkv, attention.o_proj.weight, gate_up, mlp.down_proj.weight)]
            self.layers.append((layer.input_layernorm, layer.post_attention_layernorm, *packed))
        self.hidden_size = config.hidden_size
        self.head = pack(model.get_output_embeddings().weight)
        shape = (len(self.layers), batch * self.num_key_heads)
        # Keys are kept transposed: the product with the query is then twice as fast.
        self.keys = torch.zeros(*shape, self.head_dim, slots, dtype=torch.bfloat16)
        self.values = torch.zeros(*shape, slots, self.head_dim, dtype=torch.bfloat16)

    def norm(self, hidden: Tensor, norm: Any) -> Tensor:
        return F.rms_norm(hidden, norm.weight.shape, norm.weight, norm.variance_epsilon)

    @torch.inference_mode()
    def start(self, prefix: list[int]) -> None:
        """Puts the keys and values of `prefix`, from the model itself in full precision, at slots 0.. of every row."""
        output = self.body(torch.tensor([prefix]), use_cache=True)
        # The output's field for the cache has another name from transformers 5.20 on.
        cache = next(value for value in output.values() if isinstance(value, Cache))
        self.first_logits = self.head(output.last_hidden_state[0, -1:])  # law of the first token after the prefix
        for index, layer in enumerate(cache.layers):
            self.keys[index, ..., : len(prefix)] = layer.keys[0].transpose(1, 2).repeat(self.batch, 1, 1)
            self.values[index, :, : len(prefix)] = layer.values[0].repeat(self.batch, 1, 1)

    @torch.inference_mode()
    def step(self, tokens: Tensor, positions: Tensor, slot: int, is_hidden: Tensor) -> Tensor:
        """Feeds one token a row and returns the final hidden states.

        Args:
            tokens (`Tensor`, int64 [B]): the tokens.
            positions (`Tensor`, int64 [B]): their positions in their own text.
            slot (`int`): the cache slot they take.
            is_hidden (`Tensor`, bool [B, slot + 1]): slots a row may not look at.
        Returns:
            `Tensor` [B, H] float32, after the final norm.
        """
        rows, groups = tokens.shape[0], self.num_heads // self.num_key_heads
        hidden = self.body.embed_tokens(tokens)
        cos, sin = self.body.rotary_emb(hidden[:, None], positions[:, None])  # [B, 1, head_dim]
        blocked = is_hidden.repeat_interleave(self.num_key_heads, 0)[:, None]  # [B * key heads, 1, T]
        split = [
            self.num_heads * self.head_dim,
            self.num_key_heads * self.head_dim,
            self.num_key_heads * self.head_dim,
        ]
        for index, (norm_in, norm_mid, qkv, out, gate_up, down) in enumerate(self.layers):
            query, key, value = qkv(self.norm(hidden, norm_in)).split(split, -1)
            query = rotate(query.view(rows, self.num_heads, self.head_dim), cos, sin)
            key = rotate(key.view(rows, self.num_key_heads, self.head_dim), cos, sin)
            keys, values = self.keys[index], self.values[index]
            keys[..., slot] = key.reshape(-1, self.head_dim)
            values[:, slot] = value.reshape(-1, self.head_dim)
            query = (query * self.head_dim**-0.5).view(-1, groups, self.head_dim).bfloat16()
            scores = torch.bmm(query, keys[..., : slot + 1]).float().masked_fill_(blocked, float("-inf"))
            mixed = torch.bmm(scores.softmax(-1).bfloat16(), values[:, : slot + 1]).float()
            hidden = hidden + out(mixed.view(rows, -1))
            gate, up = gate_up(self.norm(hidden, norm_mid)).chunk(2, -1)
            hidden = hidden + down(F.silu(gate) * up)
        return self.norm(hidden, self.body.norm)


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = states.chunk(2, -1)
    return states * cos + torch.cat([-second, first], -1) * sin


def pack(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """bfloat16 weights and inputs with float32 sums: twice as fast as float32 where the CPU has the instructions."""
    weight = weight.detach().bfloat16().contiguous()
    return lambda states: F.linear(states.bfloat16(), weight).float()
