"""The token ids of a batch in transformers' layout: left-padded prompts, then what was generated, row by row.

Column c of row b is position c - padding[b]. Rows grow at their own speed; a row that has finished leaves the batch
but keeps its place here. Drafts are written behind the committed tokens, where the next round overwrites them.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Sequences:
    """Tokens of R rows, B of which are still being written.

    Args:
        prompt (`torch.Tensor` of shape [R, P]): left-padded token ids.
        padding (`torch.Tensor` of shape [R], on the CPU): padded columns of each row.
        max_length (`int`): most columns a row may have, prompt and padding included.
        pad_token_id (`int`): what follows a row that ended early.
    """

    def __init__(self, prompt: Tensor, padding: Tensor, max_length: int, pad_token_id: int):
        num_rows, self.prompt_length = prompt.shape
        # Twice the new tokens, as rows near their end are filled up with as many drafts as the others have
        self.tokens = prompt.new_full((num_rows, 2 * max_length - self.prompt_length), pad_token_id)
        self.tokens[:, : self.prompt_length] = prompt
        self.text = self.tokens.cpu().clone()  # the committed tokens, as the host knows them
        self.padding, self.max_length, self.pad_token_id = padding, max_length, pad_token_id
        self.length = torch.full((num_rows,), self.prompt_length)  # committed columns [R], on the CPU
        self._activate(torch.arange(num_rows))

    def _activate(self, rows: Tensor) -> None:
        self.rows = rows  # [B] of R, on the CPU
        self.row_index = rows.to(self.tokens.device)  # the same on the device
        self._refresh()

    def _refresh(self) -> None:
        self.column = self.length[self.rows].to(self.tokens.device)  # [B], next column to commit

    @property
    def num_active(self) -> int:
        return len(self.rows)

    def remaining(self) -> Tensor:
        """[B] on the CPU: tokens that each row may still get."""
        return self.max_length - self.length[self.rows]

    def slots(self, offset: int = 0) -> Tensor:
        """[B] on the CPU: position of the column `offset` behind the last committed one."""
        return (self.length - self.padding)[self.rows] + offset

    def position(self) -> Tensor:
        """[B] on the device: position of the next token."""
        return self.column - self.padding[self.rows].to(self.column.device)

    def read(self, offset: int, count: int) -> Tensor:
        """[B, count]: the columns from `offset` behind the next one; offset -1 is the last committed token."""
        columns = self.column[:, None] + torch.arange(offset, offset + count, device=self.column.device)
        return self.tokens[self.row_index[:, None], columns]

    def write(self, offset: int, tokens: Tensor) -> None:
        """Put `tokens` [B, count] `offset` columns behind the next one, uncommitted."""
        columns = self.column[:, None] + torch.arange(offset, offset + tokens.shape[1], device=self.column.device)
        self.tokens[self.row_index[:, None], columns] = tokens

    def prefix(self, index: int, extra: int) -> Tensor:
        """[1, columns]: all of active row `index` up to `extra` uncommitted columns."""
        row = int(self.rows[index])
        return self.tokens[row : row + 1, : int(self.length[row]) + extra]

    def commit(self, block: Tensor, count: Tensor) -> None:
        """Keep the first `count` [B] of the tokens `block` [B, T] (both on the CPU) that were written at offset 0."""
        place = torch.arange(block.shape[1])
        self.text[self.rows[:, None], self.length[self.rows, None] + place] = block
        self.length[self.rows] += count
        self._refresh()

    def keep(self, index: Tensor) -> None:
        """Go on with the active rows `index` (on the CPU) only."""
        self._activate(self.rows[index])

    def output(self) -> Tensor:
        """[R, columns of the longest row], padded on the right."""
        columns = torch.arange(int(self.length.max()), device=self.tokens.device)
        is_written = columns < self.length.to(self.tokens.device)[:, None]
        return self.tokens[:, : len(columns)].where(is_written, self.pad_token_id)
