"""Files of JSON lines: where a line ends, what is no text, and one run at a time."""

from __future__ import annotations

import json
import os

import pytest

from cactus_hf.bench.prompts import read_prompts
from cactus_hf.json_lines import claimed, read_lines


ODD = "a\u2028b\x85c\u2029d"  # line breaks to `str.splitlines`, which JSON leaves as they are


def test_a_line_ends_at_a_line_break_only(tmp_path):
    path = tmp_path / "a.jsonl"
    line = json.dumps({"prompt": ODD}, ensure_ascii=False)
    path.write_text(f"{line}\n{line}\n", encoding="utf-8")
    assert read_lines(path) == [line, line, ""] and read_prompts(str(path)) == [ODD, ODD]


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "x"}\n', encoding="utf-8-sig")
    assert read_prompts(str(tmp_path / "a.jsonl")) == ["x"]


def test_what_is_no_text(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"a\.jsonl is no text in UTF-8 .*give a file of JSON lines"):
        read_prompts(str(tmp_path / "a.jsonl"))


@pytest.mark.skipif(os.name == "nt", reason="no such locks on Windows")
def test_a_file_is_claimed_by_one_run(tmp_path):
    path = tmp_path / "a.jsonl"
    with claimed(path), claimed(None):
        with pytest.raises(ValueError, match=r"Another run is writing to .*a\.jsonl"), claimed(path):
            pass
    with claimed(path):
        assert path.read_text() == ""
