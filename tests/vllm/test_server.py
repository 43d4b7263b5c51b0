"""docs/serving.md as written: its command starts a server, its `openai` code asks it, its `LLM` runs."""

from __future__ import annotations

import re
import shlex
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest


openai = pytest.importorskip("openai", reason="tests/vllm/run")
pytest.importorskip("vllm.version", reason="tests/vllm/run")  # this folder has the name too

PAGE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
HUB = {"Qwen/Qwen2.5-1.5B-Instruct": "target", "Qwen/Qwen2.5-0.5B-Instruct": "draft"}
START_SECONDS = 300  # a start takes some thirty, and much longer on a machine that does other things


def block(mark: str) -> str:
    return re.search(rf"<!-- {mark} -->\n```\w+\n(.*?)```", PAGE, re.DOTALL)[1]


@pytest.fixture(scope="module")
def port(pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Of a server that the page's command has started."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    log_file = tmp_path_factory.mktemp("server") / "log"
    command = shlex.split(local(block("server").replace("\\\n", ""), pair, port))
    assert command[:2] == ["vllm", "serve"]
    command = [str(Path(sys.executable).parent / "vllm"), *command[1:], "--dtype", "float32", "--enforce-eager"]
    with log_file.open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as server:
        try:
            wait_for(server, port, log_file)
            yield port
        finally:
            server.terminate()


def local(text: str, pair: Path, port: int) -> str:
    for hub_id, name in HUB.items():
        text = text.replace(hub_id, str(pair / name))
    return text.replace("8000", str(port))


def wait_for(server: subprocess.Popen, port: int, log: Path) -> None:
    for _ in range(START_SECONDS):
        time.sleep(1)
        if server.poll() is not None:
            break
        try:
            urllib.request.urlopen(f"http://localhost:{port}/health")
            return
        except OSError:
            pass
    pytest.fail(f"the server did not start: {log.read_text()[-4000:]}")


def test_the_pages_client(pair: Path, port: int, capsys: pytest.CaptureFixture) -> None:
    exec(local(block("client"), pair, port), {})
    found = re.findall(
        r"^(streamed, )?delta ([\d.]+): ([\d.]+) tokens a round\n(.*?)(?=^streamed|^delta|\Z)",
        capsys.readouterr().out,
        re.MULTILINE | re.DOTALL,
    )
    assert [(bool(streamed), float(delta)) for streamed, delta, _, _ in found] == [
        (False, 0),
        (True, 0),
        (False, 1),
        (True, 1),
    ]
    plain, cactus = ([float(each[2]) for each in found if float(each[1]) == delta] for delta in (0, 1))
    assert all(each[3].strip() for each in found) and 1 <= sum(plain) / 2 < sum(cactus) / 2 <= 6


def test_a_delta_is_the_requests_own(pair: Path, port: int) -> None:
    """Delta 0 draws from the target's law and infinity keeps every draft."""
    client = openai.OpenAI(base_url=f"http://localhost:{port}/v1", api_key="none")
    lengths = []
    for delta in (0, 1e9):
        extra = {"vllm_xargs": {"cactus_delta": delta}, "ignore_eos": True}
        answer = client.completions.create(
            model=str(pair / "target"), prompt="a", max_tokens=60, temperature=1.0, extra_body=extra
        )
        lengths.append(answer.metrics["speculative_decoding"]["mean_acceptance_length"])
    assert lengths[0] < 4 and lengths[1] == 6, "five drafts and the token behind them"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"cactus_delta": -1}, "cactus_delta must be a number of nats"),
        ({"cactus_delta": "much"}, "cactus_delta must be a number of nats"),
        ({"cactus_delte": 1}, "Did you mean 'cactus_delta'"),
    ],
)
def test_a_bad_delta_is_the_requests_error(pair: Path, port: int, asked: dict, message: str) -> None:
    client = openai.OpenAI(base_url=f"http://localhost:{port}/v1", api_key="none")
    with pytest.raises(openai.BadRequestError, match=message):
        client.completions.create(model=str(pair / "target"), prompt="a", extra_body={"vllm_xargs": asked})


def test_the_pages_engine(pair: Path, capsys: pytest.CaptureFixture) -> None:
    fast = 'dtype="float32", enforce_eager=True, distributed_executor_backend="uni", additional_config='
    code = local(block("offline"), pair, 0).replace("additional_config=", fast)
    namespace: dict = {}
    exec(code, namespace)
    namespace["llm"].llm_engine.engine_core.shutdown()
    *_, statistics = capsys.readouterr().out.splitlines()
    assert "'rule': 'cactus:0'" in statistics and "'ball_kl': 0.0}" not in statistics
