"""How many bytes the fused verification moves to and from memory, by counting what the kernels load and store."""

from __future__ import annotations

from .tiles import TILE


def bytes_moved(
    batch_size: int,
    num_drafted: int,
    vocab_size: int,
    logit_bytes: int,
    *,
    num_rejected: int,
    has_draft: bool = True,
    has_normaliser: bool = False,
    tile: int = TILE,
) -> int:
    """
    Bytes moved for one block, by a rule whose residual compares the two laws.

    Args:
        batch_size, num_drafted, vocab_size (`int`):
            B, m and V; all sequences have m drafts.
        logit_bytes (`int`):
            Size of one logit.
        num_rejected (`int`):
            Sequences in which a draft was rejected. They read a row of either model, the others one of the target.
        has_draft (`bool`, *optional*, defaults to `True`):
            Whether there are logits of the draft.
        has_normaliser (`bool`, *optional*, defaults to `False`):
            Whether the draft's normaliser was given.
        tile (`int`, *optional*):
            Logits of a tile.

    Returns:
        `int`, all logits and the sums of tiles. The scalars of a position (about 100 bytes) are left out.
    """
    num_tiles = -(-vocab_size // tile)
    row, chosen = vocab_size * logit_bytes, min(tile, vocab_size) * logit_bytes
    models = 1 + (has_draft and not has_normaliser)
    num_kept = batch_size - num_rejected
    # First pass: rows, and their tiles' peaks and totals, written and read again
    first = batch_size * num_drafted * models * (row + 2 * num_tiles * 8)
    # Second pass: rows (without a draft's logits, the one tile that holds the rejected token), then the tile drawn
    kept = row + num_tiles * 8 + chosen
    rejected = (2 * row + 2 * chosen) if has_draft else 2 * chosen
    # ... with the sum of each tile, written and read, and the tiles of the first pass, read by both kernels
    rejected += num_tiles * (2 * 8 + 8)
    return first + num_kept * (kept + num_tiles * 8) + num_rejected * (rejected + num_tiles * 8)
