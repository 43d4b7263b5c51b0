"""The command line as a shell meets it: exit codes, one line for each mistake, nothing else on either stream."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

import cactus_hf
from cactus_hf import cli


def run_as(monkeypatch, action) -> None:
    """Lets `cactus-hf demo` do `action` instead of its work."""
    module = SimpleNamespace(add_arguments=lambda parser: None, run=action)
    monkeypatch.setattr(cli.importlib, "import_module", lambda name: module)


def raising(error: BaseException):
    def action(args):
        raise error

    return action


@pytest.mark.parametrize("argv", [["--version"], ["--help"], ["demo", "--help"]])
def test_help_and_version(argv: list[str], capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    out, err = capsys.readouterr()
    assert stop.value.code == 0 and not err
    expected = {"--version": cactus_hf.__version__, "--help": "demo", "demo": "--num-assistant-tokens"}
    assert expected[argv[0]] in out


def test_each_command_is_listed_with_its_module(capsys) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    listed = capsys.readouterr().out
    assert all(command.name in listed and command.summary[:20] in listed for command in cli.COMMANDS)


@pytest.mark.parametrize("name", [command.name for command in cli.COMMANDS])
def test_each_command_takes_help(name: str, capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main([name, "--help"])
    assert stop.value.code == 0 and f"usage: cactus-hf {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv, said",
    [
        ([], "cactus-hf: the following arguments are required: COMMAND"),
        (["dmeo"], "cactus-hf: argument COMMAND: invalid choice: 'dmeo'"),
        (["demo", "--detla", "1"], "unrecognized arguments: --detla 1"),
        (["demo", "--delta", "-1"], "cactus-hf demo: argument --delta: needs a number of at least 0, got '-1'"),
        (["demo", "--delta", "nan"], "argument --delta: needs a number of at least 0, got 'nan'"),
        (["demo", "--temperature", "0"], "argument --temperature: needs a number above 0, got '0'"),
        (["demo", "--top-p", "1.5"], "argument --top-p: needs a number above 0 and at most 1, got '1.5'"),
        (["demo", "--max-new-tokens", "2.5"], "--max-new-tokens: needs a whole number of at least 1, got '2.5'"),
    ],
)
def test_mistakes_in_the_arguments_are_one_line(argv: list[str], said: str, capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and not out
    assert said in err and err.endswith("--help)\n") and err.count("\n") == 1


@pytest.mark.parametrize("error", [ValueError("no\n  good"), OSError("no good"), ImportError("no good")])
def test_mistakes_of_the_user_are_one_line(error: Exception, monkeypatch, capsys) -> None:
    run_as(monkeypatch, raising(error))
    assert cli.main(["demo"]) == 2
    assert capsys.readouterr() == ("", "cactus-hf demo: no good\n")


def test_our_own_mistakes_keep_their_traceback(monkeypatch) -> None:
    run_as(monkeypatch, raising(RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["demo"])


def test_ctrl_c(monkeypatch, capsys) -> None:
    run_as(monkeypatch, raising(KeyboardInterrupt()))
    assert cli.main(["demo"]) == 130
    assert capsys.readouterr() == ("", "\ninterrupted\n")


@pytest.mark.parametrize("status, code", [(None, 0), (0, 0), (3, 3)])
def test_exit_status_is_the_commands(status: int | None, code: int, monkeypatch) -> None:
    run_as(monkeypatch, lambda args: status)
    assert cli.main(["demo"]) == code


def test_reader_that_stops_early_ends_it_quietly() -> None:
    # `demo --help` goes through argparse, so a command of our own prints until the pipe is full
    program = (
        "import sys, types; from cactus_hf import cli\n"
        "show = lambda args: [print('line') for _ in range(100_000)]\n"
        "cli.importlib.import_module = lambda name: types.SimpleNamespace(add_arguments=print, run=show)\n"
        "sys.exit(cli.main(['demo']))"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=120) == 141
        assert process.stderr.read() == b""
