"""The token ids of a batch in transformers' layout: left-padded prompts, then what was generated, row by row.

Column c of row b is position c - padding[b]. Rows grow at their own speed; a row that has finished leaves the batch
but keeps its place here. Drafts are written behind the committed tokens, where the next round overwrites them.
"""

from __future__ import annotations

from collections.abc import Iterator

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
        self.pad_token_id = pad_token_id
        self.tokens = prompt.long()
        self.text = self.tokens.cpu().clone()  # the committed tokens, as the host knows them
        self.padding, self.max_length = padding, max_length
        self.length = torch.full((num_rows,), self.prompt_length)  # committed columns [R], on the CPU
        self.activate(torch.arange(num_rows))

    def activate(self, rows: Tensor) -> None:
        """Go on with the rows `rows` [B] (on the CPU) of the R."""
        self.rows = rows  # [B] of R, on the CPU
        self.row_index = rows.to(self.tokens.device)  # the same on the device
        self.only_row = int(rows[0]) if len(rows) == 1 else None
        self._refresh()

    def _refresh(self) -> None:
        self.active_length = self.length[self.rows]  # [B] on the CPU
        self.next_slot = self.active_length - self.padding[self.rows]  # [B] on the CPU
        self.column = self.active_length.to(self.tokens.device)  # [B], next column to commit
        self.longest = max(self.active_length.tolist())

    @property
    def num_columns(self) -> int:
        """Committed columns of the longest row."""
        return int(self.length.max())

    def num_generated(self) -> Tensor:
        """[B] on the CPU: tokens that each row has got."""
        return self.active_length - self.prompt_length

    def remaining(self) -> Tensor:
        """[B] on the CPU: tokens that each row may still get."""
        return self.max_length - self.active_length

    def slots(self, offset: int = 0) -> Tensor:
        """[B] on the CPU: position of the column `offset` behind the last committed one."""
        return self.next_slot + offset if offset else self.next_slot

    def position(self) -> Tensor:
        """[B] on the device: position of the next token."""
        return self.slots().to(self.column.device)

    def read(self, offset: int, count: int) -> Tensor:
        """[B, count]: the columns from `offset` behind the next one; offset -1 is the last committed token."""
        if self.only_row is not None:
            return self.tokens[self._of_only_row(self.only_row, offset, count)]
        columns = self.column[:, None] + torch.arange(offset, offset + count, device=self.column.device)
        return self.tokens[self.row_index[:, None], columns]

    def _of_only_row(self, row: int, offset: int, count: int) -> tuple[slice, slice]:
        """Where `read` and `write` find a single active row; slices are several times cheaper than indices."""
        column = self.longest + offset
        return slice(row, row + 1), slice(column, column + count)

    def only_text(self) -> Tensor:
        """[1, length] of the only active row, without its padding."""
        row = int(self.rows[0])
        return self.tokens[row : row + 1, int(self.padding[row]) : int(self.length[row])]

    def read_at(self, first: Tensor, count: int) -> Tensor:
        """[B, count]: the tokens from position `first` [B] (on the CPU) on, with any tokens outside a row's text."""
        if self.only_row is not None:
            offset = first.tolist()[0] - self.next_slot.tolist()[0]
            if 0 <= self.longest + offset <= self.tokens.shape[1] - count:
                return self.read(offset, count)
        columns = (first + self.padding[self.rows])[:, None] + torch.arange(count)
        columns = columns.clamp(0, self.tokens.shape[1] - 1).to(self.tokens.device)
        return self.tokens[self.row_index[:, None], columns]

    def by_length(self) -> Iterator[tuple[int, Tensor]]:
        """Committed lengths of the active rows, each with the numbers of the rows (on the CPU) that have it."""
        length = self.length[self.rows]
        for each in length.unique().tolist():
            yield each, (length == each).nonzero()[:, 0]

    def write(self, offset: int, tokens: Tensor) -> None:
        """Put `tokens` [B, count] `offset` columns behind the next one, uncommitted."""
        self._reserve(self.longest + offset + tokens.shape[1])
        if self.only_row is not None:
            self.tokens[self._of_only_row(self.only_row, offset, tokens.shape[1])] = tokens
            return
        columns = self.column[:, None] + torch.arange(offset, offset + tokens.shape[1], device=self.column.device)
        self.tokens[self.row_index[:, None], columns] = tokens

    def _reserve(self, num_columns: int) -> None:
        missing = num_columns - self.tokens.shape[1]
        if missing > 0:  # by half as much again, so that copying costs O(1) a token
            more = (0, max(missing, self.tokens.shape[1] // 2))
            self.tokens, self.text = (
                torch.nn.functional.pad(tokens, more, value=self.pad_token_id) for tokens in (self.tokens, self.text)
            )

    def commit(self, block: Tensor, count: Tensor) -> None:
        """Keep the first `count` [B] of the tokens `block` [B, T] (both on the CPU) that were written at offset 0."""
        if self.only_row is not None:
            self.text[self._of_only_row(self.only_row, 0, block.shape[1])] = block
        else:
            self.text[self.rows[:, None], self.active_length[:, None] + torch.arange(block.shape[1])] = block
        self.length[self.rows] = self.active_length + count
        self._refresh()

    def keep(self, index: Tensor) -> None:
        """Go on with the active rows `index` (on the CPU) only."""
        self.activate(self.rows[index])

    def behind_ends(self) -> tuple[Tensor, Tensor, bool]:
        """What plain decoding has read of rows from where the first of them ended: tokens [R, T], the same columns of
        every row and at least one; the position of the first [R] on the CPU; and whether rows ended at different ones.
        """
        begin = min(int(self.length.min()) - 1, self.num_columns - 2)
        is_uneven = bool((self.length != self.length[0]).any())
        return self.output()[:, begin:-1], begin - self.padding, is_uneven

    def output(self) -> Tensor:
        """[R, columns of the longest row], padded on the right."""
        columns = torch.arange(self.num_columns, device=self.tokens.device)
        is_written = columns < self.length.to(self.tokens.device)[:, None]
        return self.tokens[:, : len(columns)].where(is_written, self.pad_token_id)
