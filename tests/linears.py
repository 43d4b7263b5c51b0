"""What the tests of packed layers share: tiny models, and a comparison of weights."""

from __future__ import annotations

import torch
from torch import nn

import tiny


OWN = tiny.ARCHITECTURES["llama"].build()  # shared with no test that may leave a hook, which cannot be pickled
TIED = tiny.model("llama", tie_word_embeddings=True)
IDS = torch.randint(4, tiny.VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))


def assert_same_weights(model: nn.Module, expected: nn.Module) -> None:
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=0, atol=0)
