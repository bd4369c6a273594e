"""The two commands of the README in a clone that has nothing: no environment, no cache of the kernel, no store."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        pytest.skip("this is not a checkout, so it cannot be cloned")
    folder = tmp_path_factory.mktemp("fresh") / "betternorm"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
    return folder


def make(target: str, clone: Path) -> subprocess.CompletedProcess[str]:
    bare = {name: value for name, value in os.environ.items() if name in ("PATH", "LANG", "BETTERNORM_TEST_DATA")}
    bare |= {"HOME": str(clone.parent), "PATH": os.pathsep.join(_without_environments(bare["PATH"]))}
    return subprocess.run(["make", target], cwd=clone, env=bare, capture_output=True, text=True)


def _without_environments(path: str) -> list[str]:
    return [folder for folder in path.split(os.pathsep) if not (Path(folder).parent / "pyvenv.cfg").exists()]


def test_make_demo(clone: Path) -> None:
    found = make("demo", clone)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "batch norm" in found.stdout
    assert (clone / "build" / "demo" / "report.html").is_file()

    started = time.monotonic()
    again = make("demo", clone)
    print(f"make demo, a second time: {time.monotonic() - started:.1f} s")
    assert again.returncode == 0
    tables = found.stdout.partition("training images of")[2]  # after what setting up and training say
    assert tables
    assert tables in again.stdout  # from the rows that are there: nothing is trained again


def test_make_test(clone: Path) -> None:
    found = make("test", clone)
    assert found.returncode == 0, found.stdout + found.stderr
    assert " passed" in found.stdout


def test_make_docs(clone: Path) -> None:
    assert make("docs", clone).returncode == 0
    assert (clone / "site" / "index.html").is_file()
