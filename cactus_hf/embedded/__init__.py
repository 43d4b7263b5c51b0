"""The pair of models that works out of the box, and the recipe that made its draft."""

from .draft import load_draft
from .pair import load_pair, load_target


__all__ = ["load_draft", "load_pair", "load_target"]
