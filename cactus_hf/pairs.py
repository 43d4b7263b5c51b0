"""Pairs of a target and a draft that share a tokenizer: named ones on the Hub, and how to load any."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm


if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


# name -> (target, draft), ids on the Hub
PAIRS = {
    "gemma-2-9b": ("google/gemma-2-9b-it", "google/gemma-2-2b-it"),
    "gemma-3-1b": ("google/gemma-3-1b-it", "google/gemma-3-270m-it"),
    "llama-3.1-8b": ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.2-1B-Instruct"),
    "qwen2.5-7b": ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct"),
    "qwen2.5-coder-1.5b": ("Qwen/Qwen2.5-Coder-1.5B-Instruct", "Qwen/Qwen2.5-Coder-0.5B-Instruct"),
    "qwen2.5-coder-7b": ("Qwen/Qwen2.5-Coder-7B-Instruct", "Qwen/Qwen2.5-Coder-0.5B-Instruct"),
    "qwen3-8b": ("Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B"),
    "qwen3-14b": ("Qwen/Qwen3-14B", "Qwen/Qwen3-0.6B"),
    "qwen3-32b": ("Qwen/Qwen3-32B", "Qwen/Qwen3-1.7B"),
    "r1-distill-7b": ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"),
    "smollm2-1.7b": ("HuggingFaceTB/SmolLM2-1.7B-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"),
}
HUB_TIMEOUT = 10  # seconds to wait for the Hub's first answer
REMEDY = "pass folders with --model and --assistant, or none of --pair, --model and --assistant for the embedded pair"


def named(name: str) -> tuple[str, str]:
    """
    The Hub ids of target and draft of the pair called `name`.

    Raises:
        ValueError: if there is none; the message gives the nearest names.
    """
    if name in PAIRS:
        return PAIRS[name]
    near = difflib.get_close_matches(name.lower(), PAIRS, n=3, cutoff=0.4)
    hint = f"Did you mean {' or '.join(near)}? " if near else ""
    raise ValueError(f"There is no pair called {name!r}. {hint}Known pairs: {', '.join(PAIRS)}.")


def load(
    model: str,
    assistant: str,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    progress: bool = True,
) -> tuple[PreTrainedModel, PreTrainedModel, PreTrainedTokenizerBase]:
    """
    Loads a target and its draft, each from a local folder, the Hugging Face cache, or else the Hub.

    Args:
        model (`str`): Folder or Hub id of the target.
        assistant (`str`): Folder or Hub id of the draft.
        device (`str` or `torch.device`, *optional*): Where both go; by default the GPU if CUDA has one, else the CPU.
        dtype (`str` or `torch.dtype`, *optional*): Type of the weights; by default float32 on a CPU and the
            checkpoint's own elsewhere.
        progress (`bool`, *optional*, defaults to `True`): Whether to show a progress bar on standard error.

    Returns:
        `tuple`: target, draft, and the tokenizer they share.

    Raises:
        ValueError: for a folder or id that is not there, a model that does not fit, or two different tokenizers.
        OSError: if the Hub is needed and cannot be reached.
    """
    device = find_device(device)
    dtype = dtype or ("float32" if device.type == "cpu" else "auto")
    with tqdm(total=4, desc="Loading the pair", unit="part", leave=False, disable=None if progress else True) as bar:
        from transformers import AutoModelForCausalLM, AutoTokenizer  # takes seconds, so not before the bar is there

        def part(auto: Any, name: str, what: str, **options: Any) -> Any:
            bar.set_postfix_str(f"{what} of {name}")
            loaded = from_pretrained(auto, name, progress, **options)
            bar.update()
            return loaded

        tokenizer = part(AutoTokenizer, model, "tokenizer")
        check_tokenizers(tokenizer, part(AutoTokenizer, assistant, "tokenizer"), model, assistant)
        target, draft = (
            part(AutoModelForCausalLM, name, "weights", dtype=dtype).to(device).eval() for name in (model, assistant)
        )
    return target, draft, tokenizer


def find_device(name: str | torch.device | None = None) -> torch.device:
    """
    The device called `name`, by default the GPU if CUDA has one, else the CPU.

    Raises:
        ValueError: if there is no such device here.
    """
    import torch

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        module = torch.get_device_module(device)
    except RuntimeError as error:
        raise ValueError(f"{name!r} is no device: {_first_line(error)}") from error
    num_devices = module.device_count() if module.is_available() else 0
    if (device.index or 0) >= num_devices:
        raise ValueError(
            f"There is no device {name} here: torch {torch.__version__} finds {num_devices} of that kind."
        )
    return device


def check_tokenizers(
    tokenizer: PreTrainedTokenizerBase, draft_tokenizer: PreTrainedTokenizerBase, model: str, assistant: str
) -> None:
    """Refuses a draft whose tokens are not the target's; one that lacks some or has more behind the end is fine."""
    target_tokens = {id: token for token, id in tokenizer.get_vocab().items()}
    draft_tokens = {id: token for token, id in draft_tokenizer.get_vocab().items()}
    differing = [id for id in target_tokens.keys() & draft_tokens.keys() if target_tokens[id] != draft_tokens[id]]
    if differing:
        id = min(differing)
        raise ValueError(
            f"{model} and {assistant} have different tokenizers: token {id} is {target_tokens[id]!r} in the first and "
            f"{draft_tokens[id]!r} in the second. Speculative sampling needs a draft with the target's own tokenizer, "
            "as small models of the same family have."
        )


def from_pretrained(auto: Any, name: str, progress: bool = True, **options: Any) -> Any:
    """`auto.from_pretrained(name)`, from the disk where it is there, so that neither a start nor an error waits."""
    is_folder = Path(name).is_dir()
    if is_folder and not Path(name, "config.json").is_file():
        raise ValueError(f"The folder {name} holds no model: it has no config.json, as `save_pretrained` writes it.")
    try:
        with _own_bars(False):
            return auto.from_pretrained(name, local_files_only=True, **options)
    except (ValueError, OSError) as error:
        if is_folder or isinstance(error, ValueError):
            raise ValueError(f"{auto.__name__} cannot load {name}: {_first_line(error)}") from error
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ValueError(f"There is no folder {name}. Check the path, or {REMEDY}.")
    _find_on_hub(name)
    try:
        with _own_bars(progress):
            return auto.from_pretrained(name, **options)
    except OSError as error:  # gated files, a broken download, a repository without weights
        raise ValueError(f"{name} is on the Hub but cannot be loaded: {_first_line(error)}") from error


@contextmanager
def _own_bars(is_shown: bool) -> Iterator[None]:
    """Hides the progress bars of transformers and the Hub for a while, unless `is_shown`."""
    from transformers.utils import logging

    hide = not is_shown and logging.is_progress_bar_enabled()
    if hide:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if hide:
            logging.enable_progress_bar()


def _find_on_hub(name: str) -> None:
    """Asks the Hub once for `name`; transformers would retry for a minute before it says that there is no network."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    tried = f"{name} is neither a folder nor in the cache ({os.path.expanduser(constants.HF_HUB_CACHE)})"
    try:
        HfApi().model_info(name, timeout=HUB_TIMEOUT)
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ValueError(
            f"{tried}, and the Hub has no such model (or a private one). Check the id, or {REMEDY}."
        ) from error
    except Exception as error:  # which class it is depends on the HTTP client of the installed huggingface_hub
        raise OSError(
            f"{tried}, and the Hub could not be asked ({type(error).__name__}: {_first_line(error)}). Run `hf "
            f"download {name}` where there is a network, {REMEDY}."
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
