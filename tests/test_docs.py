"""Everything that the README and the docs tell a reader to type is run, and every link leads somewhere.

Python blocks of a page run one after the other in one namespace. The reader's own things are at hand: a network as
``model``, data as ``train_loader`` and ``val_loader``, and the files that `readers_folder` writes. Lines of shell that
call ``betternorm`` run too. Where one cannot run here, a comment before the block says why, as in
``<!-- not run: needs a cluster -->``; its options are checked all the same.
"""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import pkgutil
import re
import shlex
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import betternorm
from betternorm.cli import COMMANDS, FINDING, OK, build_parser, main

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(ROOT.glob("docs/**/*.md"))]
PROJECT = (ROOT / "pyproject.toml").read_text()
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]

# Commands that are themselves tested elsewhere, and take minutes or more wherever they are called.
LONG = {"demo", "reproduce", "report", "bench", "train"}

NETS = """
from torch import nn

def build():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10),
    )
"""


@dataclass(frozen=True)
class Block:
    """A fenced block, or a run of indented lines that begin with ``$``."""

    language: str
    text: str
    line: int
    reason: str  # why it is not run; empty where it is

    def commands(self) -> list[list[str]]:
        """The commands in it, word by word, without prompts, comments and what they print."""
        joined = self.text.replace("\\\n", " ")
        prompted = re.findall(r"^\s*\$ (.*)$", joined, flags=re.MULTILINE)
        lines = prompted or joined.splitlines()
        return [words for line in lines if (words := shlex.split(line, comments=True))]


def blocks(page: Path) -> list[Block]:
    found = []
    text = page.read_text(encoding="utf-8")
    fence = r"^(?:<!-- not run: (?P<reason>.+?) -->\n+)?```(?P<language>\w*)[^\n]*\n(?P<body>.*?)^```$"
    for match in re.finditer(fence, text, flags=re.MULTILINE | re.DOTALL):
        line = text[: match.start("body")].count("\n") + 1
        found.append(Block(match["language"], match["body"], line, match["reason"] or ""))
    for match in re.finditer(r"^    \$ .*$(?:\n    .*$)*", text, flags=re.MULTILINE):
        found.append(Block("sh", match[0], text[: match.start()].count("\n") + 1, ""))
    return found


def with_language(*languages: str) -> Any:
    cases = [
        pytest.param(page, block, id=f"{name}:{block.line}")
        for page, name in zip(PAGES, NAMES, strict=True)
        for block in blocks(page)
        if block.language in languages
    ]
    return pytest.mark.parametrize(("page", "block"), cases)


@pytest.fixture
def readers_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the pages say that a reader has: a model's file, its checkpoint, images and their labels."""
    (tmp_path / "mine.py").write_text(NETS)
    (tmp_path / "nets").mkdir()
    (tmp_path / "nets" / "mine.py").write_text(NETS)
    for name in ("mine.pt", "best.pth"):
        torch.save(_model().state_dict(), tmp_path / name)
    images = np.random.default_rng(0).integers(0, 256, (64, 16, 16, 3), dtype=np.uint8)
    np.savez(tmp_path / "val.npz", images=images, labels=np.arange(64) % 10)
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
    return tmp_path


def _model() -> nn.Module:
    names: dict[str, Any] = {}
    exec(NETS, names)
    network: nn.Module = names["build"]()
    return network.eval()


def _loader(examples: int) -> Any:
    data = torch.utils.data.TensorDataset(torch.randn(examples, 3, 16, 16), torch.arange(examples) % 10)
    return torch.utils.data.DataLoader(data, batch_size=16)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_python_of_a_page_runs(page: Path, readers_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {
        "__name__": "__main__",  # where dataclasses look for it
        "torch": torch,
        "model": _model(),
        "train_loader": _loader(64),
        "val_loader": _loader(64),
        "test_loader": _loader(32),
    }
    for block in blocks(page):
        if block.language != "python" or block.reason:
            continue
        with warnings.catch_warnings():
            # An untrained network on noise: nothing is to be gained, and the library says so.
            warnings.filterwarnings("ignore", message="the gain in .* is not distinguishable from zero")
            if ">>> " in block.text:
                _run_doctest(block, names, page)
            else:
                lines = "\n" * (block.line - 1)  # so that an error names the line of the page
                exec(compile(lines + block.text, str(page), "exec"), names)


def _run_doctest(block: Block, names: dict[str, Any], page: Path) -> None:
    test = doctest.DocTestParser().get_doctest(block.text, names, page.name, str(page), block.line)
    said: list[str] = []
    failed, _ = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=said.append, clear_globs=False)
    names |= test.globs
    assert not failed, "".join(said)


@with_language("sh", "bash", "console", "shell")
def test_commands_of_a_page_run(
    page: Path, block: Block, readers_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in block.commands():
        _check(words, block)


def _check(words: list[str], block: Block) -> None:
    program, *rest = words
    if program == "betternorm":
        if rest and rest[0] in COMMANDS:
            arguments = rest[: rest.index("|")] if "|" in rest else rest
            if "--help" in arguments:
                return
            build_parser({rest[0]}).parse_args(arguments)
            if not block.reason and rest[0] not in LONG and not _needs_weights(arguments):
                assert main([*arguments, *_smaller(arguments)]) in (OK, FINDING)
        else:
            assert rest in (["--help"], ["--version"]), f"there is no command {rest[:1]}"
    elif program == "make":
        known = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
        assert set(rest) <= set(known), f"the Makefile has no {set(rest) - set(known)}"
    elif program in ("pip", "eval", "cd", "git", "export", "open"):
        for extra in re.findall(r"betternorm\[([\w,]+)\]", " ".join(rest)):
            assert all(re.search(rf"^{name} = \[", PROJECT, flags=re.MULTILINE) for name in extra.split(","))
    elif program == "python":
        _check_python(rest)
    elif program == "torchrun":
        module = rest.index("-m")
        assert rest[module + 1] == "betternorm.cli"
        command = [word for word in rest[module + 2 :] if not word.startswith("$")]
        build_parser({command[0]}).parse_args(command)
    else:
        assert program in ("ray",), f"{words} is neither run nor checked here"


def _needs_weights(arguments: list[str]) -> bool:
    """A published network that is to be tuned needs its weights, and data that it was trained for."""
    return arguments[0] == "tune" and arguments[1].startswith(("timm:", "torchvision:"))


def _smaller(arguments: list[str]) -> list[str]:
    """Options that make a command on a large network a matter of seconds."""
    large = arguments[0] == "inspect" and arguments[1].startswith(("timm:", "torchvision:"))
    return ["--quick", "--batch-size", "2", "--input", "3,64,64"] if large else []


def _check_python(rest: list[str]) -> None:
    if rest[0] == "-m":
        top = rest[1].split(".")[0]
        here = (ROOT / rest[1].replace(".", "/")).with_suffix(".py")
        assert here.is_file() or (ROOT / rest[1].replace(".", "/")).is_dir() or importlib.util.find_spec(top)
    else:
        assert (ROOT / rest[0]).is_file(), f"there is no {rest[0]}"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    generated = {ROOT / "docs" / "reference.md"}
    missing = [
        target
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[\w-]*)?\)", text)
        if "://" not in target
        and not (page.parent / target).exists()
        and (page.parent / target).resolve() not in generated
    ]
    assert not missing


# The examples of the lab train networks; those of the integrations are in examples/.
MODULES = [
    module.name
    for module in pkgutil.walk_packages(betternorm.__path__, "betternorm.")
    if not module.name.startswith(("betternorm.lab", "betternorm.integrations"))
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name: str) -> None:
    results = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert results.failed == 0


@pytest.mark.parametrize("name", betternorm.__all__)
def test_every_public_name_is_documented(name: str) -> None:
    thing = getattr(betternorm, name)
    assert thing.__doc__, f"betternorm.{name} has no docstring"


def test_one_version() -> None:
    assert 'dynamic = ["version"]' in PROJECT
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), flags=re.MULTILINE)
    changed = re.search(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert cited is not None
    assert changed is not None
    assert betternorm.__version__ == cited[1] == changed[1]
