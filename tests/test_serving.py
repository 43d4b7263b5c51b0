"""`transformers serve`: its handlers run an enabled model with what a request's generation config says."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest

import cactus_hf
import tiny


pytest.importorskip("fastapi", reason="transformers serve needs the packages of transformers[serving]")
pytest.importorskip("openai", reason="transformers serve needs the packages of transformers[serving]")
pytest.importorskip("uvicorn", reason="transformers serve needs the packages of transformers[serving]")
serving = pytest.importorskip("transformers.cli.serving.chat_completion")

TARGET, DRAFT = tiny.pair("llama", vocab=260)
GREEDY = {"do_sample": False, "max_new_tokens": 20, "pad_token_id": tiny.PAD}
DOCS = Path(__file__).parents[1] / "docs" / "integrations.md"
GENERATE = re.search(r"<!-- file: generate.py -->\n```python\n(.*?)```", DOCS.read_text(), re.S)[1]


@pytest.fixture
def folder(tmp_path):
    TARGET.save_pretrained(tmp_path / "target")
    tiny.byte_tokenizer().save_pretrained(tmp_path / "target")
    return tmp_path / "target"


@pytest.fixture
def start(folder):
    """Starts the server's handler of chats without its network part; returns how to ask it."""
    from transformers.cli.serving.model_manager import ModelManager
    from transformers.cli.serving.utils import GenerationState

    started = []

    def start_with(**options):
        manager, state = ModelManager(device="cpu", force_model=str(folder), **options), GenerationState()
        started.extend((manager, state))
        handler = serving.ChatCompletionHandler(model_manager=manager, generation_state=state)

        def ask(stream=False, **config):
            body = {"model": str(folder), "messages": [{"role": "user", "content": "hello"}], "stream": stream}
            body["generation_config"] = json.dumps(GREEDY | config)
            return asyncio.run(answer(handler, body))

        return ask

    yield start_with
    for each in started:
        each.shutdown()
    cactus_hf.disable()


async def answer(handler, body) -> str:
    response = await handler.handle_request(body, "a request")
    if not body["stream"]:
        return json.loads(response.body)["choices"][0]["message"]["content"]
    stream = "".join([part async for part in response.body_iterator])
    events = [event.removeprefix("data: ") for event in stream.split("\n\n")]
    choices = [json.loads(event)["choices"] for event in events if event.startswith("{")]
    return "".join(choice[0]["delta"].get("content") or "" for choice in choices if choice)


@pytest.mark.parametrize("source", ({"prompt_lookup_num_tokens": 3}, {"assistant_early_exit": 1}), ids=str)
@pytest.mark.parametrize("stream", (False, True))
def test_a_request_may_ask_for_it(start, source, stream):
    ask = start()
    plain = ask(stream)
    cactus_hf.enable()
    assert ask(stream, cactus_delta=1.0, **source) == plain
    if not stream:
        with pytest.raises(ValueError, match="cactus_delta.*-1"):
            ask(cactus_delta=-1.0, **source)


def test_without_enable_the_delta_has_no_effect(start):
    """Nothing of ours runs, so nothing can refuse it: documented in docs/integrations.md."""
    ask = start()
    assert ask(cactus_delta=-1.0, prompt_lookup_num_tokens=3) == ask()


def test_a_draft_model_comes_with_the_models_folder(start, folder, monkeypatch, tmp_path):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    plain = start()()
    DRAFT.save_pretrained(tmp_path / "draft")
    (folder / "custom_generate").mkdir()
    code = GENERATE.replace("Qwen/Qwen2.5-0.5B-Instruct", str(tmp_path / "draft"))
    (folder / "custom_generate" / "generate.py").write_text(code)
    ask = start(trust_remote_code=True)
    assert ask(cactus_delta=1.0) == plain
    with pytest.raises(ValueError, match="cactus_delta.*-1"):
        ask(cactus_delta=-1.0)
