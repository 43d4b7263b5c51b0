"""docs/models.md, made from the tables of families: `python tests/families_page.py` writes it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import transformers
from architectures import FLAGS, Architecture
from families import ARCHITECTURES
from test_encoder_decoder import MODELS
from test_multimodal import FAMILIES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


PAGE = Path(__file__).parents[1] / "docs" / "models.md"
RELEASE = "5.24"  # of transformers, that the page is about
TITLES = {  # by kind
    "decoder": "Text models",
    "image": "Text and images (tests/test_multimodal.py)",
    "encoder": "Encoder-decoder models (tests/test_encoder_decoder.py)",
}
BATCHES = {
    "ragged": ("yes", "together"),
    "one row": ("yes", "one by one"),
    "alone": ("yes", "no"),
    "refused": ("no", "no"),
}


class Line(NamedTuple):
    """A line of the table of its kind."""

    kind: str
    model_type: str
    batch: str  # a key of `BATCHES`
    attention: str
    remark: str


# Tested in files of their own
OTHERS = (
    *(Line("image", name, "ragged", "eager, sdpa", "") for name in FAMILIES if name != "paligemma"),
    Line("image", "paligemma", "alone", "eager, sdpa", "a batch of prompts without images goes together"),
    Line("image", "mllama", "refused", "eager, sdpa", "images by cross attention; prompts without images go together"),
    *(Line("encoder", name, "one row", "eager, sdpa", "") for name in MODELS),
    Line("encoder", "whisper", "one row", "sdpa", "its draft may be a decoder that reads the target's encoder"),
)


def line_of(row: Architecture) -> Line:
    flags = [meaning for flag, meaning in FLAGS.items() if flag in row.flags and meaning]
    since = [] if row.since == "5.17" else ["not with transformers 5.17"]
    remark = "; ".join([*flags, *([row.remark] if row.remark else []), *since])
    return Line(row.kind, row.model_type, row.batch, ", ".join(row.attention), remark)


def lines(rows: Iterable[Architecture] = ARCHITECTURES.values()) -> list[Line]:
    """One for each family; several where what it can do depends on its configuration."""
    return sorted({*(line_of(row) for row in rows if "dynamic_rope" not in row.flags), *OTHERS})


def page(all_lines: list[Line]) -> str:
    """The text of docs/models.md."""
    listed = {line.model_type for line in all_lines}
    others = ", ".join(f"`{name}`" for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in listed)
    parts = [
        "# Models\n\n",
        f"What becomes of the model types of transformers {RELEASE}, as target and as draft. The tests decode every\n",
        "line greedily with each attention implementation named, alone and in a batch of prompts of different\n",
        "lengths, and compare with plain `generate()`.\n\n",
        "* Batch **together**: all rows in each forward pass, whatever their lengths.\n",
        "* Batch **one by one**: right, with a warning, and no faster than the rows alone.\n",
        "* **no**: an error before the first forward pass that says why.\n",
        "* Recurrent: a round in which a draft is rejected costs one more forward pass, over the tokens that were\n",
        "  kept.\n",
        "* Transformers 5.17, the oldest release supported, lacks some of these types; with the others it does the\n",
        "  same, but for those marked.\n",
        "* Other attention implementations (flash, flex) run batches one by one.\n",
    ]
    for kind, title in TITLES.items():
        rows = [line for line in all_lines if line.kind == kind]
        sizes = {batch: len({line.model_type for line in rows if line.batch == batch}) for batch in BATCHES}
        counts = ", ".join(
            f"{size} {'alone only' if batch == 'alone' else BATCHES[batch][1]}"
            for batch, size in sizes.items()
            if size
        )
        parts += [f"\n## {title}\n\n", f"{counts}.\n\n"]
        parts += ["| model type | alone | batch | attention | |\n|---|---|---|---|---|\n"]
        for line in rows:
            alone, together = BATCHES[line.batch]
            parts.append(f"| `{line.model_type}` | {alone} | {together} | {line.attention} | {line.remark} |\n")
    parts += [
        "\n## Types that are not listed\n\n",
        "A model of another type, a fork's or a later release's, is tried out on each call: tokens of the prompt\n",
        "are taken back and scored again, in a batch as if beside a longer row, and the logits compared with those\n",
        "that they had. Rows that influence one another are then decoded one by one, and a model that gives other\n",
        "logits even alone is refused. Models with running states are refused unless they are listed.\n\n",
        f"Types of transformers {RELEASE} with a language-modelling head that are not listed above: {others}.\n",
    ]
    return "".join(parts)


if __name__ == "__main__":
    assert transformers.__version__.startswith(RELEASE), f"needs transformers {RELEASE}"
    PAGE.write_text(page(lines()), encoding="utf-8")
