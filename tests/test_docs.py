"""Every code block of README.md, CONTRIBUTING.md and docs/ runs, or its command is parsed, or says here why not."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import cactus_hf
import tiny
from cactus_hf import cli
from cactus_hf.config import KEYWORDS
from cactus_hf.evaluation.methods import parse_rule


ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]

# Pages whose Python blocks other tests run.
ELSEWHERE = {
    "docs/integrations.md": "test_integrations_page.py",
    "docs/custom_generate/README.md": "test_integrations_page.py",
    "docs/serving.md": "vllm/test_server.py",
}
# Why a block is not run here, by its page and a part of its text that no other block of the page has.
NOT_RUN = {
    ("README.md", ".venv/bin/cactus-hf demo"): "installs into a fresh environment; tests/test_demo.py runs the demo",
    ("README.md", ".venv/bin/python -m pytest"): "runs all tests; .ci/run takes the command from here",
    ("CONTRIBUTING.md", ".venv/bin/ruff check"): "runs all tests; .ci/run has the same steps",
    ("docs/evaluation.md", "pip install"): "installs; .ci/run has lm-eval too",
    ("docs/evaluation.md", "accelerate launch"): "several processes; tests/test_ranks.py has the command",
    ("docs/guide.md", "pip install"): "installs; tests/test_demo.py runs the demo",
    ("docs/integrations.md", "curl localhost"): "asks a server; tests/test_serving.py sends what it sends",
    ("docs/serving.md", "test_bench_of_both_engines"): "needs vLLM; it runs such tests",
    ("docs/serving.md", "pip install"): "installs; tests/vllm/make_venv.sh makes such an environment",
    ("docs/multiple_processes.md", "torchrun"): "several processes; tests/test_ranks.py runs the file",
    ("docs/multiple_processes.md", "gather_object"): "several processes; tests/test_ranks.py runs the file",
    ("docs/multiple_processes.md", "tp_size=2"): "several processes; tests/test_ranks.py makes such models",
    ("docs/multiple_processes.md", "fsdp_size=2"): "several processes; tests/test_ranks.py makes such models",
}
# What pages besides README.md and the guide take as given.
GIVEN = """
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
import cactus_hf

name, draft_name = "Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct"
tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
model = cactus_hf.enable(AutoModelForCausalLM.from_pretrained(name))
draft = AutoModelForCausalLM.from_pretrained(draft_name)
texts = ["The saguaro is", "In a desert at night"]
ids = sorted(set(tokenizer(texts[0]).input_ids))
inputs = tokenizer(texts, return_tensors="pt", padding=True)
GenerationConfig(cactus_delta=0.02, max_new_tokens=32).save_pretrained("DIR")
"""
HUB = {"Qwen/Qwen2.5-1.5B-Instruct": "target", "Qwen/Qwen2.5-0.5B-Instruct": "draft"}


class Block(NamedTuple):
    page: str
    line: int
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def reason(self) -> str | None:
        """Why it is not run."""
        return next((why for (page, part), why in NOT_RUN.items() if page == self.page and part in self.code), None)


def blocks_of(path: Path) -> list[Block]:
    text = path.read_text(encoding="utf-8")
    page = path.relative_to(ROOT).as_posix()
    found = re.finditer(r"^( *)```([^`\n]*)\n(.*?)^\1```$", text, re.MULTILINE | re.DOTALL)
    return [Block(page, text.count("\n", 0, m.start()) + 1, m[2], textwrap.dedent(m[3])) for m in found]


BLOCKS = [block for path in PAGES for block in blocks_of(path)]
TO_RUN = [block for block in BLOCKS if block.reason is None]


def in_language(*languages: str) -> list[Block]:
    return [block for block in TO_RUN if block.language in languages]


def test_every_block_is_handled() -> None:
    """A new kind of block needs a test here; the marks of fences must come in pairs."""
    assert {block.language for block in TO_RUN} <= {"python", "bash", "json"}, "run it, or give a reason in NOT_RUN"
    fences = sum(len(re.findall(r"^ *```", path.read_text(encoding="utf-8"), re.MULTILINE)) for path in PAGES)
    assert fences == 2 * len(BLOCKS)


def test_every_reason_is_about_one_block() -> None:
    for page, part in NOT_RUN:
        assert len([block for block in BLOCKS if block.page == page and part in block.code]) == 1, (page, part)
    assert set(ELSEWHERE) <= {block.page for block in BLOCKS}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with a tiny target and draft, and with a pipeline's files."""
    for name, model in zip(HUB.values(), tiny.pair("llama", vocab=260), strict=True):
        model.save_pretrained(tmp_path / name)
        tiny.byte_tokenizer().save_pretrained(tmp_path / name)
    (tmp_path / "docs").symlink_to(DOCS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    yield tmp_path
    cactus_hf.disable()


PYTHON_PAGES = sorted({block.page for block in in_language("python")} - ELSEWHERE.keys())


@pytest.mark.parametrize("page", PYTHON_PAGES)
def test_python_blocks_run_one_after_another(page: str, folder: Path, monkeypatch) -> None:
    blocks = [block for block in in_language("python") if block.page == page]
    if any("custom_generate" in block.code for block in blocks):  # the folder asks for it, which need not be installed
        monkeypatch.setattr("transformers.generation.utils.check_python_requirements", lambda *args, **kwargs: None)
    namespace: dict = {}
    if page not in ("README.md", "docs/guide.md"):
        exec(with_tiny_models(GIVEN), namespace)
    with cactus_hf.track() as calls:
        for block in blocks:
            torch.manual_seed(0)
            exec(compile("\n" * block.line + with_tiny_models(block.code), str(ROOT / page), "exec"), namespace)
    assert calls or "calls" in namespace or not any(".generate(" in block.code for block in blocks)


def with_tiny_models(code: str) -> str:
    for hub_id, name in HUB.items():
        code = code.replace(hub_id, name)
    return code


@pytest.mark.parametrize("block", in_language("bash"), ids=str)
def test_commands_are_understood(block: Block) -> None:
    """Each line: an option that the command does not have, or a value that it does not take, ends in an error."""
    variables: dict[str, str] = {}
    for line in block.code.replace("\\\n", " ").splitlines():
        for name, value in variables.items():
            line = line.replace(f"${name}", value)
        words = shlex.split(line, comments=True)
        if not words:
            continue
        if assigned := re.fullmatch(r"(\w+)=(.*)", words[0]):
            variables[assigned[1]] = assigned[2]
            words = words[1:]
        match words:
            case []:
                pass
            case ["cactus-hf", *argv]:
                args = cli.make_parser(argv).parse_args(argv)
                assert callable(args.run)
            case ["vllm", "serve", _, *argv]:  # tests/vllm/test_server.py starts it
                options = dict(zip(argv, argv[1:], strict=False))
                assert json.loads(options["--speculative-config"])["num_speculative_tokens"] > 0
                parse_rule(json.loads(options["--additional-config"])["cactus_hf"])
            case ["python", "-m", module, *_]:
                assert importlib.util.find_spec(module) is not None
            case ["python", script, *_]:
                assert (ROOT / script).exists()
            case _:
                pytest.fail(f"{block}: `{line}` is no command that this test knows: give a reason in NOT_RUN")


def test_the_reference_is_complete() -> None:
    reference = "".join(path.read_text(encoding="utf-8") for path in (DOCS / "api").glob("*.md"))
    assert {f"cactus_hf.{name}" for name in cactus_hf.__all__} <= set(re.findall(r"^::: ([\w.]+)$", reference, re.M))
    assert {command.name for command in cli.COMMANDS} == set(re.findall(r"^<!-- help: (\w+) -->$", reference, re.M))
    assert set(KEYWORDS) <= set(re.findall(r"^\| `(\w+)` \|", reference, re.M))


@pytest.mark.parametrize("block", in_language("json"), ids=str)
def test_json_is_json(block: Block) -> None:
    for line in block.code.splitlines():
        json.loads(line)
