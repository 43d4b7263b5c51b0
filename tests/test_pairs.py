"""Loading pairs from folders, and what is said when it cannot be done: at once, and with what to do next."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import RepositoryNotFoundError
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

import tiny
from cactus_hf import pairs


def save(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> str:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[str, str]:
    root = tmp_path_factory.mktemp("pair")
    target, draft = tiny.pair("llama")
    return save(root / "target", target, tiny.word_tokenizer()), save(root / "draft", draft, tiny.word_tokenizer())


def test_folders_load(folders: tuple[str, str]) -> None:
    target, draft, tokenizer = pairs.load(*folders, device="cpu")
    for loaded, saved in zip((target, draft), tiny.pair("llama"), strict=True):
        assert not loaded.training and loaded.dtype == torch.float32
        assert all(torch.equal(loaded.state_dict()[name], weight) for name, weight in saved.state_dict().items())
    assert tokenizer.get_vocab() == tiny.word_tokenizer().get_vocab()


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16])
def test_dtype_is_taken(folders: tuple[str, str], dtype: str | torch.dtype) -> None:
    target, draft, _ = pairs.load(*folders, device="cpu", dtype=dtype)
    assert target.dtype == draft.dtype == torch.bfloat16


def test_progress_goes_to_a_terminal_only(folders: tuple[str, str], capfd) -> None:
    logging.enable_progress_bar()
    pairs.load(*folders, device="cpu")
    assert capfd.readouterr() == ("", "")
    assert logging.is_progress_bar_enabled(), "the setting of transformers must be as it was"


def test_named_pairs_are_two_different_models_of_the_hub() -> None:
    for target, draft in pairs.PAIRS.values():
        assert target != draft and target.count("/") == draft.count("/") == 1


def test_named() -> None:
    assert pairs.named("qwen3-8b") == ("Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B")


@pytest.mark.parametrize(
    "name, nearest", [("qwen3-8", "qwen3-8b"), ("Gemma-2", "gemma-2-9b"), ("llama3.1-8b", "llama")]
)
def test_unknown_name_gets_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=f"no pair called '{name}'. Did you mean .*{nearest}"):
        pairs.named(name)


def test_unlike_name_gets_them_all() -> None:
    with pytest.raises(ValueError, match=f"'%'. Known pairs: {', '.join(pairs.PAIRS)}"):
        pairs.named("%")


def test_different_tokenizers_are_refused(folders: tuple[str, str], tmp_path: Path) -> None:
    other = save(tmp_path / "other", tiny.model("llama"), tiny.word_tokenizer(rotate=1))
    with pytest.raises(ValueError, match="different tokenizers: token 4 is 'w4' in the first and 'w5' in the second"):
        pairs.load(folders[0], other, device="cpu")


def test_a_longer_or_shorter_vocabulary_of_the_same_tokens_fits() -> None:
    for sizes in ((97, 80), (80, 97)):
        pairs.check_tokenizers(*map(tiny.word_tokenizer, sizes), "target", "draft")


def test_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="There is no folder .*nowhere. Check the path"):
        pairs.load(str(tmp_path / "nowhere"), "x", device="cpu")


def test_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no model: it has no config.json"):
        pairs.load(str(tmp_path), str(tmp_path), device="cpu")


def test_folder_without_weights(folders: tuple[str, str], tmp_path: Path) -> None:
    tiny.word_tokenizer().save_pretrained(tmp_path)
    tiny.model("llama").config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"AutoModelForCausalLM cannot load {tmp_path}: "):
        pairs.load(folders[0], str(tmp_path), device="cpu")


def test_no_network_is_told_at_once(monkeypatch) -> None:
    def refuse(*args, **kwargs):
        raise RuntimeError("name not known\nand much more")  # what the class is depends on the HTTP client

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", refuse)
    start = time.monotonic()
    with pytest.raises(
        OSError, match=r"could not be asked \(RuntimeError: name not known\). Run `hf download nobody/x`"
    ):
        pairs.load("nobody/x", "nobody/y", device="cpu")
    assert time.monotonic() - start < 10  # transformers alone retries for 23 seconds a file


def test_unknown_id(monkeypatch) -> None:
    def find_nothing(*args, **kwargs):
        raise RepositoryNotFoundError("404", response=SimpleNamespace(headers={}, request=None))

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", find_nothing)
    with pytest.raises(ValueError, match="neither a folder nor in the cache .* no such model .* Check the id"):
        pairs.load("nobody/x", "nobody/y", device="cpu")


def test_offline_mode_reaches_for_no_network() -> None:
    with pytest.raises(OSError, match="OfflineModeIsEnabled"):  # conftest.py sets it
        pairs.load("nobody/x", "nobody/y", device="cpu")


@pytest.mark.parametrize("device", ["cpu:7", "nonsense", "cuda:99"])
def test_device_that_is_not_there(device: str) -> None:
    with pytest.raises(ValueError, match=device):
        pairs.find_device(device)


def test_default_device() -> None:
    assert pairs.find_device().type == ("cuda" if torch.cuda.is_available() else "cpu")
