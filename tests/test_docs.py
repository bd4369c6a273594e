"""All code and commands in the README and the docs run, and all links lead somewhere.

The Python blocks of a page are executed in order in one namespace, which has a ``model``, ``train_loader``,
``val_loader`` and ``test_loader``, unlabeled ``images``, the ``mean`` and ``std`` of their normalization, and the files
that `readers_folder` writes. Commands are run too, with options appended that make them small.
"""

from __future__ import annotations

import doctest
import importlib
import itertools
import os
import pkgutil
import re
import shlex
import shutil
import socket
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

import betternorm
from betternorm.cli import FINDING, OK
from betternorm.cli.main import COMMANDS, build_parser, main
from betternorm.errors import UncertainGainWarning
from betternorm.integrations.models import load_model

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(ROOT.glob("docs/**/*.md"))]
PROJECT = (ROOT / "pyproject.toml").read_text()
README = (ROOT / "README.md").read_text()
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]

SHELL = ("sh", "console")
SMALL_TRAINING = [
    *("--epochs", "1", "--steps-per-epoch", "2", "--batch-size", "8", "--image-size", "32", "--width", "4"),
    *("--blocks", "1", "--alpha-grid", "0", "0.5", "--threads", "1", "--quiet"),
]

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

    def commands(self) -> list[list[str]]:
        """The commands in it, split into words, without prompts, comments and output."""
        joined = self.text.replace("\\\n", " ")
        prompted = re.findall(r"^\s*\$ (.*)$", joined, flags=re.MULTILINE)
        lines = prompted or joined.splitlines()
        return [words for line in lines if (words := shlex.split(line, comments=True))]

    @property
    def slow(self) -> bool:
        """Whether it starts processes, runs every experiment, or measures."""
        words = [word for command in self.commands() for word in command]
        return bool({"torchrun", "python", "ray", "processes", "all"} & set(words))


def blocks(page: Path) -> list[Block]:
    found = []
    text = page.read_text(encoding="utf-8")
    fence = r"^```(?P<language>\w*)[^\n]*\n(?P<body>.*?)^```$"
    for match in re.finditer(fence, text, flags=re.MULTILINE | re.DOTALL):
        line = text[: match.start("body")].count("\n") + 1
        found.append(Block(match["language"], match["body"], line))
    for match in re.finditer(r"^    \$ .*$(?:\n    .*$)*", text, flags=re.MULTILINE):
        found.append(Block("sh", match[0], text[: match.start()].count("\n") + 1))
    return found


def shell_blocks() -> Any:
    cases = [
        pytest.param(page, block, id=f"{name}:{block.line}", marks=[pytest.mark.slow] * block.slow)
        for page, name in zip(PAGES, NAMES, strict=True)
        for block in blocks(page)
        if block.language in SHELL
    ]
    return pytest.mark.parametrize(("page", "block"), cases)


@pytest.fixture(scope="session")
def readers_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the pages use: models, checkpoints, images and datasets."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "mine.py").write_text(NETS)
    (folder / "classes.txt").write_text("".join(f"class-{number}\n" for number in range(1000)))
    (folder / "nets").mkdir()
    (folder / "nets" / "mine.py").write_text(NETS)
    for name in ("mine.pt", "best.pth"):
        torch.save(_model().state_dict(), folder / name)
    save_file(load_model("timm:resnet50").state_dict(), folder / "resnet50.safetensors")
    images = np.random.default_rng(0).integers(0, 256, (200, 32, 32, 3), dtype=np.uint8)
    np.savez(folder / "val.npz", images=images[:128, :16, :16], labels=np.arange(128) % 10)
    for part in ("val", "photos", "imagenet/val"):
        for number, image in enumerate(images[:40]):
            place = folder / part / f"class-{number % 10}" / f"{number}.png"
            place.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(place)
    parts = {f"{part}_images": images for part in ("train", "val", "test")}
    parts |= {f"{part}_labels": np.arange(200) % 100 for part in ("train", "val", "test")}
    (folder / "data").mkdir()
    np.savez(folder / "data" / "cifar100.npz", **parts)
    return folder


@pytest.fixture
def readers_folder(readers_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of these files, as the current and as the home directory."""
    shutil.copytree(readers_files, tmp_path, copy_function=os.link, dirs_exist_ok=True)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
    return tmp_path


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("localhost", 0))
        return int(listening.getsockname()[1])


def _model() -> nn.Module:
    names: dict[str, Any] = {}
    exec(NETS, names)
    network: nn.Module = names["build"]()
    return network.eval()


def _loader(examples: int) -> Any:
    """Images whose pixels were normalised with mean 0.5 and std 0.25."""
    pixels = torch.rand(examples, 3, 16, 16)
    data = torch.utils.data.TensorDataset(pixels.sub(0.5).div(0.25), torch.arange(examples) % 10)
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
        "images": torch.rand(120, 3, 16, 16).sub(0.5).div(0.25),
        "mean": (0.5, 0.5, 0.5),
        "std": (0.25, 0.25, 0.25),
    }
    for block in blocks(page):
        if block.language != "python":
            continue
        with warnings.catch_warnings():
            # The model is untrained and the data are noise, so there is no significant gain.
            warnings.simplefilter("ignore", UncertainGainWarning)
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


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_block_says_its_language(page: Path) -> None:
    assert {block.language for block in blocks(page)} <= {"python", "text", *SHELL}


@shell_blocks()
def test_commands_of_a_page_run(
    page: Path, block: Block, readers_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in block.commands():
        RUNNERS[words[0]](words[1:])


def _betternorm(words: list[str]) -> None:
    assert main(in_seconds(words)) in (OK, FINDING)


def in_seconds(words: list[str]) -> list[str]:
    """A command with options appended that make it smaller; of repeated options the last one counts."""
    command, *rest = words
    if rest == ["--help"]:
        return words
    build_parser({command}).parse_args(words)  # first without what is added here
    published = bool(rest) and rest[0].startswith(("timm:", "torchvision:"))
    if command == "inspect" and published:
        return [*words, "--quick", "--batch-size", "2", "--input", "3,64,64"]
    if command == "tune" and published:
        return [*words, "--size", "32", "--class-map", "classes.txt"]
    if command == "fit":
        return [*words, "--steps", "5"]
    if command == "train":
        return [*_without_address(words), *SMALL_TRAINING]
    if command == "reproduce" and "--images" in words:
        return [*words, "--image-size", "32"]
    if command == "reproduce" and {"--candidates", "--rows-only"} <= {*words}:
        return words  # only the medium scale has candidates, and nothing is run
    if command == "reproduce":
        return [*_without_address(words), "--scale", "smoke", "--seeds", "1", "--threads", "1", "--quiet"]
    return words


def _without_address(words: list[str]) -> list[str]:
    """Without the address of a cluster Ray starts a local one."""
    at = words.index("--address") if "--address" in words else len(words)
    return words[:at] + words[at + 2 :]


def _torchrun(words: list[str]) -> None:
    """A command for several machines runs as two groups of processes on this one."""
    program = words.index("-m")
    assert words[program + 1] == "betternorm.cli"
    command = in_seconds(words[program + 2 :])
    if "imagenet" in command:
        command += ["--dataset", "stand-in:imagenet", "--no-tune-alpha"]
    options = words[:program]
    nodes = int(options[options.index("--nnodes") + 1]) if "--nnodes" in options else 1
    if nodes > 1:
        options += ["--nproc-per-node", "1", "--rdzv-endpoint", f"localhost:{free_port()}"]
        options += ["--local-addr", "localhost"]
    launch = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "betternorm.cli", *command]
    started = [subprocess.Popen(launch) for _ in range(nodes)]
    assert [process.wait(timeout=600) for process in started] == [0] * nodes


def _python(words: list[str]) -> None:
    """The benchmarks, from the checkout, with few rounds."""
    if "benchmarks" in words:
        words = [*words, "--rounds", "20", "--only", "memory", "--json", str(Path.cwd() / "out.json")]
        words += [] if torch.cuda.is_available() else ["--device", "cpu"]
    else:
        at = words.index("--update") + 1
        copy = shutil.copy(ROOT / words[at], Path.cwd() / "copy.md")
        words = [*words[:at], str(copy), "--only", "resnet18"]
    subprocess.run([sys.executable, *words], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def _make(words: list[str]) -> None:
    """A dry run; `test_fresh_clone` runs the targets."""
    assert subprocess.run(
        ["make", "--dry-run", "--always-make", *words], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout


def _pip(words: list[str]) -> None:
    """The extras exist; `test_release` installs the package."""
    for extra in re.findall(r"betternorm\[([\w,]+)\]", " ".join(words)):
        assert all(re.search(rf"^{name} = \[", PROJECT, flags=re.MULTILINE) for name in extra.split(","))


RUNNERS = {"betternorm": _betternorm, "torchrun": _torchrun, "python": _python, "make": _make, "pip": _pip}


@pytest.mark.parametrize("command", COMMANDS)
def test_examples_in_a_help_text_are_understood(command: str) -> None:
    """An example is a line that starts with the program; a comment may follow after two spaces."""
    module = importlib.import_module(COMMANDS[command].module)
    lines = re.findall(r"^  betternorm (\S.*)$", module.EXAMPLES, flags=re.MULTILINE)
    assert lines
    for line in lines:
        words = shlex.split(re.split(r"\s{2,}|\|", line)[0])
        assert words[0] == command
        build_parser({command}).parse_args(words)


def test_the_readme_quotes_the_results() -> None:
    """Every percentage of a table row that links to a results page is a mean in a table of that page."""
    lines = re.findall(r"^\| \[.*?\]\((docs/results/[\w/-]+\.md)\)(.*)$", README, flags=re.MULTILINE)
    assert len(lines) >= 5
    for page, line in lines:
        cells = re.findall(r"(\d+\.\d+)(?: ± | \(| (?=\|))", (ROOT / page).read_text())
        means = {f"{float(mean):.1f}" for mean in cells}
        quoted = re.findall(r"\d+\.\d", line)
        assert quoted
        assert set(quoted) <= means, f"{page} has no such means: {set(quoted) - means}"


def _readme_rows(first: str) -> list[list[str]]:
    """The cells of the rows of the README's table whose header contains ``first``."""
    table = next(part for part in README.split("\n\n") if first in part.partition("\n")[0])
    return [[cell.strip() for cell in line.strip("| ").split("|")] for line in table.splitlines()[2:]]


def test_the_readme_quotes_the_benchmarks() -> None:
    """The table of costs has the columns of the benchmarks page that were measured with the default allocator."""
    names = {
        "**`GhostBatchNorm(C, 16)`**": "GhostBatchNorm(16)",
        "**`GhostBatchNorm(C, 2)`**": "GhostBatchNorm(2)",
        "**`BatchGroupNorm(32, C)`**": "BatchGroupNorm(32)",
        "loop over chunks": "chunk loop (16)",
    }
    lines = (ROOT / "docs/benchmarks.md").read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if "float32, with page faults" in line)
    columns = [cell.strip() for cell in lines[start].split("|")]
    table = itertools.takewhile(lambda line: line.startswith("|"), lines[start + 2 :])
    cells = {row[1].strip(): row for row in (line.split("|") for line in table)}
    rows = _readme_rows("| float32 |")
    assert len(rows) == len(names)
    for label, *quoted in rows:
        variant = next(variant for words, variant in names.items() if words in label)
        wanted = ("float32, with page faults", "channels_last, with page faults")
        assert quoted == [cells[variant][columns.index(name)].strip() for name in wanted], label


def test_the_readme_quotes_the_page_on_shift() -> None:
    page = (ROOT / "docs/results/shift.md").read_text()

    def row(name: str) -> list[float]:
        line = next(line for line in page.splitlines() if line.startswith(f"| {name} |"))
        return [float(cell) for cell in line.strip("| ").split("|")[1:]]

    text = " ".join(README.split())
    clean, corrupted, tuned, tuned_corrupted, _, batch, *_ = row("ResNet-20")
    ghost_clean, ghost, ghost_tuned, ghost_tuned_corrupted, _, ghost_batch, *_ = row("lab, ghost size 4")
    assert f"improves from {corrupted} to {tuned_corrupted} % and loses {clean - tuned:.1f} points" in text
    assert f"improves from {ghost} to {ghost_tuned_corrupted} % and gains {ghost_tuned - ghost_clean:.1f}" in text
    assert f"64 random images reach {batch} and {ghost_batch} %" in text


def test_the_readme_quotes_the_page_on_serving() -> None:
    page = (ROOT / "docs/serving.md").read_text()

    def measured(name: str) -> list[str]:
        """With alpha in all layers, in one, in three and in five, at batch size 1."""
        row = re.search(rf"^\| {name}, 224 \| onnxruntime \| 1 \| [\d.]+ ms \| (.+) \|$", page, re.MULTILINE)
        assert row is not None
        return row[1].split(" | ")

    resnet, mobilenet = measured("ResNet-50"), measured("MobileNetV2")
    text = " ".join(README.split())
    assert (
        f"takes {resnet[2]} times as long in onnxruntime for a ResNet-50 and {mobilenet[2]} for a MobileNetV2" in text
    )
    assert f"alpha in all layers {resnet[0]} and {mobilenet[0]}" in text


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 110


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    tutorials = ROOT.glob("docs/tutorials/*.ipynb")
    generated = {ROOT / "docs/reference/command-line.md", *(path.with_suffix(".png") for path in tutorials)}
    missing = [
        target
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[\w-]*)?\)", text)
        if "://" not in target
        and not target.startswith("../../actions/")  # pages of the Git host
        and not (page.parent / target).exists()
        and (page.parent / target).resolve() not in generated
    ]
    assert not missing


# The integrations have their examples in examples/. Triton is not installed by `make test`.
MODULES = [
    module.name
    for module in pkgutil.walk_packages(betternorm.__path__, "betternorm.")
    if not module.name.startswith(("betternorm_lab", "betternorm.integrations", "betternorm.backends.triton"))
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name: str) -> None:
    at_hand = {"betternorm": betternorm, "torch": torch, "nn": torch.nn}
    results = doctest.testmod(importlib.import_module(name), extraglobs=at_hand, optionflags=doctest.ELLIPSIS)
    assert results.failed == 0


@pytest.mark.parametrize("name", betternorm.__all__)
def test_every_public_name_is_documented(name: str) -> None:
    thing = getattr(betternorm, name)
    assert thing.__doc__, f"betternorm.{name} has no docstring"


def test_one_version() -> None:
    assert 'dynamic = ["version"]' in PROJECT
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), flags=re.MULTILINE)
    changed = re.search(r"^## \[(\d[\d.]+)\]", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert cited is not None
    assert changed is not None
    assert betternorm.__version__ == cited[1] == changed[1]
