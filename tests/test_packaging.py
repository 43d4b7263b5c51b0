"""What a user gets: the wheel, the public names, a light import, and the commands and the example of the README."""

from __future__ import annotations

import ast
import configparser
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel

import cactus_hf
import tiny


ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
RULE_MODULES = ("cactus_hf.acceptance", "cactus_hf.bounded_rules")
SHIPPED = ("cactus_hf", "setup.cfg", "pyproject.toml", "README.md", "LICENSE")


def marked(marker: str) -> str:
    """The code block behind `<!-- marker -->` in the README."""
    return re.search(rf"<!-- {marker} -->\n```\w+\n(.*?)```", README, re.DOTALL).group(1)


def test_ci_runs_the_test_command_of_the_readme():
    if os.name == "nt":
        pytest.skip("CI's script needs bash")
    printed = subprocess.run(
        ["bash", ROOT / ".ci/run", "--dry-run"], capture_output=True, text=True, check=True
    ).stdout
    command, *oldest = printed.splitlines()
    assert command + "\n" == marked("command: tests")
    assert [line.split("==")[0] for line in oldest] == ["torch", "transformers"]


def test_both_commands_are_one_line_each_on_the_first_screen():
    for marker in ("command: demo", "command: tests"):
        command = marked(marker)
        assert command.count("\n") == 1
        assert README.splitlines().index(command.strip()) < 25


def test_public_names_can_be_imported_and_are_documented():
    assert sorted(cactus_hf.__all__) == list(cactus_hf.__all__)
    for name in cactus_hf.__all__:
        assert getattr(cactus_hf, name).__doc__, name
    promised = {"enable", "disable", "track", "gamma", "verify", "emitted_law", "SpeculationStats", "TokenKind"}
    assert promised <= set(cactus_hf.__all__)


def test_submodules_are_there_without_an_import_of_their_own():
    code = "import cactus_hf; cactus_hf.embedded.load_pair; cactus_hf.law.emitted_law; cactus_hf.nothing"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stderr.strip().endswith("AttributeError: module 'cactus_hf' has no attribute 'nothing'")


def test_no_module_takes_the_place_of_a_public_name():
    """Importing a submodule sets an attribute of the package, which would hide a function of the same name."""
    assert not set(cactus_hf.__all__) & {path.stem for path in (ROOT / "cactus_hf").iterdir()}


def test_every_rule_is_in_the_table_of_the_readme():
    rules = {cls.__name__ for cls in cactus_hf.AcceptanceRule.__subclasses__() if cls.__module__ in RULE_MODULES}
    assert rules <= set(cactus_hf.__all__)
    assert rules <= set(re.findall(r"^\| `(\w+)\(", README, re.MULTILINE))


def test_the_map_in_contributing_names_every_module():
    table = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    modules = {path.name for path in (ROOT / "cactus_hf").glob("[!_]*.py")}
    assert modules == set(re.findall(r"`(\w+\.py)`", table.split("| file | holds |")[1].split("\n\n")[0]))


def test_importing_the_package_imports_nothing_optional():
    code = "import sys, cactus_hf; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"datasets", "gguf", "lm_eval"} & set(run.stdout.split())
    # torch itself may import triton, and transformers accelerate: of these only our own source can tell
    for path in (ROOT / "cactus_hf").rglob("*.py"):
        optional = {
            "accelerate",
            "datasets",
            "economize",
            "flashspec",
            "gguf",
            "lm_eval",
            "matplotlib",
            "triton",
            "vllm",
        }
        if path.parent.name == "kernels" and path.name != "__init__.py":  # imported where kernels are to run
            optional.remove("triton")
        if path.name.startswith("vllm_v"):  # imported by a vLLM that is to follow a rule
            optional.remove("vllm")
        for statement in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(statement, (ast.Import, ast.ImportFrom)):
                names = [alias.name for alias in statement.names]
                module = getattr(statement, "module", None)
                assert not optional & {name.split(".")[0] for name in [module or "", *names]}, path


def test_the_version_has_one_place():
    setup = configparser.RawConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    assert setup["metadata"]["version"] == "attr: cactus_hf.__version__"
    assert importlib.metadata.version("cactus_hf") == cactus_hf.__version__
    assert f"## {cactus_hf.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel built from a copy, as setuptools leaves folders behind where it builds."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in SHIPPED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    run = subprocess.run([*build, "-w", built, source], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    with zipfile.ZipFile(*built.glob("*.whl")) as file:
        yield file


def test_the_wheel_holds_the_package_and_nothing_else(wheel: zipfile.ZipFile):
    files = {info.filename: info.file_size for info in wheel.infolist() if not info.is_dir()}
    metadata = f"cactus_hf-{cactus_hf.__version__}.dist-info"
    assert {name.split("/")[0] for name in files} == {"cactus_hf", metadata}
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "cactus_hf").rglob("*.py")}
    assert {name for name in files if name.endswith(".py")} == modules
    assert "cactus_hf/py.typed" in files
    assert f"{metadata}/licenses/LICENSE" in files
    others = {Path(name).suffix for name in files if name.startswith("cactus_hf/")} - {".py", ".typed"}
    assert others <= {".json", ".safetensors"}


def test_the_shipped_draft_is_small(wheel: zipfile.ZipFile):
    weights = [info for info in wheel.infolist() if info.filename.endswith(".safetensors")]
    assert len(weights) == 1
    assert weights[0].file_size <= 25e6


def test_the_example_of_the_readme_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    target, draft = tiny.pair("llama")
    code = marked("example")
    for name, model in (("Qwen/Qwen2.5-1.5B-Instruct", target), ("Qwen/Qwen2.5-0.5B-Instruct", draft)):
        folder = tmp_path / name
        model.save_pretrained(folder)
        tiny.word_tokenizer().save_pretrained(folder)
        assert f'"{name}"' in code
        code = code.replace(f'"{name}"', repr(str(folder)))
    exec(code, {})
    texts = ast.literal_eval(capsys.readouterr().out)
    assert len(texts) == 2


def test_private_names_of_transformers_are_in_one_module():
    owners = (GenerationMixin, PreTrainedModel, PreTrainedConfig, GenerationConfig(), DynamicCache())
    theirs = {name for owner in owners for name in dir(owner) if name.startswith("_")} - set(dir(torch.nn.Module))
    found = {
        path.name
        for path in (ROOT / "cactus_hf").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in theirs and not node.attr.startswith("__")
    }
    assert found == {"host.py"}
