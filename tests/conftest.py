"""Settings that hold for every test: no hub, one thread, fixed seeds; and the embedded pair as a fixture."""

from __future__ import annotations

import os
import random
from pathlib import Path


os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is first imported, so before the next lines

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402


if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton's kernels run on the CPU; read when triton is first imported

# Tiny models only lose time on more threads, and sums come out in the same order everywhere.
torch.set_num_threads(int(os.environ.get("CACTUS_HF_TEST_THREADS", "1")))

# The same examples in every run, and nothing written into the working directory.
settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.load_profile("repeatable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    no_gpu = pytest.mark.skip(reason="needs a CUDA device; torch sees none")
    for item in items:
        if "real_pair" in getattr(item, "fixturenames", ()):
            item.add_marker("real_pair")
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_gpu)


@pytest.fixture(autouse=True)
def seed() -> None:
    """Every test starts from the same state of the global generators."""
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def pair_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a tiny pair, "target" and "draft", with a tokenizer of one token a byte."""
    import tiny

    root = tmp_path_factory.mktemp("pair")
    for name, model in zip(("target", "draft"), tiny.pair("llama", vocab=260, eps=0.1), strict=True):
        model.save_pretrained(root / name)
        tiny.byte_tokenizer().save_pretrained(root / name)
    return root


@pytest.fixture(scope="session")
def real_pair():
    """Target, draft and tokenizer of the embedded pair, float32 on the CPU; skips where they cannot be had."""
    from cactus_hf import embedded

    try:
        return embedded.load_pair(progress=False, device="cpu", dtype=torch.float32)
    except (ImportError, OSError) as error:  # no gguf; no cache, hub or package index
        pytest.skip(f"the embedded pair cannot be loaded: {error}")
