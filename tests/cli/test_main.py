"""The command line as one tool: help that fits a screen, the same conventions in every command."""

from __future__ import annotations

import argparse
import io
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from betternorm.cli import BAD_INPUT, INTERRUPTED, OK
from betternorm.cli.main import COMMANDS, Command, build_parser, command_parser, main
from betternorm.display import terminal
from betternorm.errors import UserError

# What a machine reads is the script itself, or a page, or a dashboard.
WITHOUT_JSON = {"completion", "report"}

NETS = """
from torch import nn

def build():
    return nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU())
"""


@pytest.fixture
def nets(tmp_path: Path) -> Path:
    path = tmp_path / "nets.py"
    path.write_text(NETS)
    return path


def test_help_fits_a_screen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert ended.value.code == OK
    assert len(lines) <= 30
    assert max(map(len, lines)) <= 80
    for name, command in COMMANDS.items():
        (line,) = (line for line in lines if line.split()[:1] == [name])
        assert command.summary in line
        assert not command.extra or line.endswith(f"[{command.extra}]")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_each_command_fits_a_screen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    parser = command_parser(name)
    lines = parser.format_help().splitlines()
    assert len(lines) <= 55
    assert len(parser.format_usage().splitlines()) == 1
    examples = str(parser.epilog).splitlines()
    assert max(len(line) for line in lines if line not in examples) <= 80
    everything = parser.format_help(everything=True)
    for action in parser.options:
        assert action.help == argparse.SUPPRESS or all(word in everything for word in action.option_strings)


def test_what_help_leaves_out_is_in_help_all(capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for word in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as ended:
            main(["train", word])
        assert ended.value.code == OK
        shown.append(capsys.readouterr().out)
    assert "--channels-last" not in shown[0]
    assert "--channels-last" in shown[1]
    assert "--norm-decay" in shown[0]


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_examples_and_the_common_options(name: str) -> None:
    parser = command_parser(name)
    assert parser.epilog is not None
    assert re.search(rf"examples?:\n +.*betternorm(\.cli)? {name}", parser.epilog)
    options = {word for action in parser.options for word in action.option_strings}
    if name != "completion":
        assert "--quiet" in options
    if name not in WITHOUT_JSON:
        assert "--json" in options
    assert not [word for word in options if "_" in word]
    for action in parser.options:
        assert action.help, f"{name} does not explain {action.option_strings or action.dest}"


def test_options_mean_the_same_everywhere() -> None:
    kinds: dict[str, set[object]] = {}
    for name in COMMANDS:
        for action in command_parser(name).options:
            for word in action.option_strings:
                kinds.setdefault(word, set()).add(isinstance(action, argparse._StoreTrueAction))
    assert [word for word, kind in kinds.items() if len(kind) > 1] == []


def test_help_imports_neither_the_lab_nor_other_libraries() -> None:
    script = (
        "import sys; from betternorm.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('timm', 'torchvision', 'lightning', 'betternorm_lab.trials') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.endswith("[]\n")


def test_a_missing_library_is_one_line_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith(("betternorm_lab", "betternorm_lab.cli.train"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "numpy", None)
    assert main(["train", "--epochs", "1"]) == BAD_INPUT
    expected = "betternorm train: needs numpy, which is not installed: pip install 'betternorm[lab]'\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (UserError("--batch-size is 0"), "betternorm inspect: --batch-size is 0\n"),
        (ValueError("odd\nsecond"), "betternorm inspect: ValueError: odd (--debug shows where)\n"),
        (ImportError("needs torchvision 9"), "betternorm inspect: needs torchvision 9\n"),
    ],
)
def test_no_traceback_unless_asked(
    error: Exception, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from betternorm.cli import inspect

    def fail(arguments: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr(inspect, "run", fail)
    assert main(["inspect", "a.py:b"]) == BAD_INPUT
    assert capsys.readouterr().err == line
    for words in (["--debug", "inspect", "a.py:b"], ["inspect", "a.py:b", "--debug"]):
        with pytest.raises(type(error)):
            main(words)


@pytest.mark.parametrize("words", [[], ["nonsense"], ["inspect"], ["inspect", "x", "--nonsense"]])
def test_bad_usage_ends_with_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == BAD_INPUT
    assert "usage: betternorm" in capsys.readouterr().err


def test_ctrl_c_ends_with_130(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\ndef build():\n    print('here', flush=True)\n    time.sleep(60)\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "betternorm.cli", "inspect", f"{tmp_path}/slow.py:build"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (INTERRUPTED, "interrupted\n")


def test_a_reader_that_goes_away_is_no_error(nets: Path) -> None:
    command = f"{sys.executable} -m betternorm.cli inspect {nets}:build --input 3,8,8 | head -n 1"
    found = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert (found.stdout.split()[0], found.stderr) == ("layer", "")


def test_plain_and_quiet_in_a_pipe_coloured_on_a_terminal(nets: Path) -> None:
    words = [sys.executable, "-m", "betternorm.cli", "inspect", f"{nets}:build", "--input", "3,8,8"]
    piped = subprocess.run(words, capture_output=True, text=True, check=True)
    assert "\x1b" not in piped.stdout + piped.stderr
    assert piped.stderr == ""

    def on_terminal(**environment: str) -> str:
        reader, writer = pty.openpty()
        with subprocess.Popen(words, stdout=writer, stderr=writer, env={**os.environ, "TERM": "xterm", **environment}):
            os.close(writer)
            parts = []
            while True:
                try:
                    parts.append(os.read(reader, 4096))
                except OSError:  # the other end is closed
                    break
                if not parts[-1]:
                    break
        os.close(reader)
        return b"".join(parts).decode()

    assert "\x1b[1mlayer" in on_terminal()
    assert "\x1b[1m" not in on_terminal(NO_COLOR="1")


def test_show_marks_the_heading_of_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", Terminal())
    terminal.show("a  b\n─  ─\n1  2")
    assert sys.stdout.getvalue() == "\x1b[1ma  b\x1b[0m\n\x1b[2m─  ─\x1b[0m\n1  2\n"


@pytest.mark.parametrize("words", [["inspect", "{nets}:build", "--input", "3,8,8", "--json"]])
def test_json_is_all_there_is_on_standard_output(
    words: list[str], nets: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word.format(nets=nets) for word in words]) == OK
    json.loads(capsys.readouterr().out)


def test_bash_completes_commands_options_and_values(capsys: pytest.CaptureFixture[str]) -> None:
    bash = shutil.which("bash") or pytest.skip("no bash on this machine")
    assert main(["completion", "bash"]) == OK
    script = capsys.readouterr().out

    def complete(*words: str) -> list[str]:
        quoted = " ".join(f"'{word}'" for word in words)
        body = f'{script}\nCOMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _betternorm; echo "${{COMPREPLY[@]}}"'
        return subprocess.run([bash, "-c", body], capture_output=True, text=True, check=True).stdout.split()

    assert complete("betternorm", "") == [*COMMANDS, "--help", "--version", "--debug"]
    assert complete("betternorm", "ins") == ["inspect"]
    assert complete("betternorm", "--debug", "inspect", "--ba") == ["--batch-size"]
    assert complete("betternorm", "inspect", "x", "--overfits", "") == ["yes", "no"]
    assert complete("betternorm", "completion", "z") == ["zsh"]
    assert complete("betternorm", "nonsense", "") == []


@pytest.mark.parametrize(("shell", "check"), [("zsh", ["-n"]), ("fish", ["--no-execute"])])
def test_completion_for_other_shells(shell: str, check: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == OK
    script = capsys.readouterr().out
    for name in COMMANDS:
        assert name in script
    if found := shutil.which(shell):
        subprocess.run([found, *check], input=script, text=True, check=True)


def test_completion_does_without_libraries_that_are_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(COMMANDS, "train", Command("betternorm.nowhere", "needs what is not there", "lab"))
    assert main(["completion", "bash"]) == OK
    assert 'train) words="--help" ;;' in capsys.readouterr().out


def test_parser_knows_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    from betternorm import __version__

    with pytest.raises(SystemExit):
        build_parser().parse_args(["--version"])
    assert capsys.readouterr().out == f"betternorm {__version__}\n"
