"""Files of JSON lines: how they are read, and that one process at a time adds to one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def read_lines(path: str | os.PathLike) -> list[str]:
    """
    The lines of a file; the last is what stands behind the last line break, so it is empty where a file is whole.

    Raises:
        ValueError: for what is no text.
        OSError: if it cannot be read.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8 ({error}): give a file of JSON lines.") from error
    # Not `splitlines`: it breaks at U+2028, U+0085 and others too, which may stand in a JSON string as they are
    return text.split("\n")


@contextmanager
def claimed(path: str | os.PathLike | None) -> Iterator[None]:
    """
    Keeps other runs from adding to a file meanwhile, where the system has such locks. The file is made if need be.

    Raises:
        ValueError: if another run is at it.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        path = None
    if path is None:
        yield
        return
    with Path(path).open("a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"Another run is writing to {path}: wait for its end, or give another file.") from None
        except OSError:  # a file system without locks
            pass
        yield
