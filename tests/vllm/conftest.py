"""Settings of vLLM for the tests, which `tests/vllm/run` starts; elsewhere they are skipped."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

import pytest
import torch


IS_READY = {"cactus_hf", "cpu_shims"} <= importlib.metadata.entry_points(group="vllm.general_plugins").names

if IS_READY:
    # Read when vLLM is imported, by its child processes too
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
    }


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="needs vLLM and its plugins: tests/vllm/run")
    for item in items:
        if not IS_READY and Path(__file__).parent in item.path.parents:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two models with 8 tokens, "target" and "draft"."""
    import tiny_engine

    folder = tmp_path_factory.mktemp("models")
    tiny_engine.save_models(folder)
    return folder


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a pair with one token a byte, "target" and "draft", with the tokenizer."""
    import tiny

    folder = tmp_path_factory.mktemp("pair")
    # Heads of 32 numbers are the least that vLLM's attention on a CPU takes
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    for name, model in zip(("target", "draft"), tiny.pair("llama", vocab=260, eps=0.1, **sizes), strict=True):
        model.save_pretrained(folder / name)
        tiny.byte_tokenizer().save_pretrained(folder / name)
    return folder


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
