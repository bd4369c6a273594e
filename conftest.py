"""Fixtures that all tests share."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from betternorm.backends import cpu, routing

# A shell without job control starts what it puts into the background deaf to Ctrl-C, and the programs that tests start
# and interrupt would inherit that.
if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Several workers with several threads each wait for one another longer than they compute.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def external_file() -> Callable[[str], Path]:
    """Finds real data and published weights in the folder $BETTERNORM_TEST_DATA; a missing file skips the test."""

    def find(name: str) -> Path:
        folder = os.environ.get("BETTERNORM_TEST_DATA")
        if not folder:
            pytest.skip(f"{name} is needed: set BETTERNORM_TEST_DATA to the folder that contains it")
        path = Path(folder, name)
        if not path.exists():
            pytest.skip(f"{path} is missing")
        return path

    return find


@pytest.fixture(params=["compiled", "plain"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to the same numbers: by the compiled kernels, and as on a machine without them."""
    if request.param == "plain":
        monkeypatch.setattr(routing, "has_kernels", lambda x: False)
    elif not cpu.loaded:
        pytest.skip(cpu.status)
    return str(request.param)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium by playwright, as `make test-slow` installs them. It opens pages without a network."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is missing: make test-slow installs it")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is missing: make test-slow installs it where it may")
    quiet = ("gpu", "background-networking", "component-update", "sync")
    flags = ["--no-sandbox", "--no-first-run", *(f"--disable-{name}" for name in quiet)]
    with playwright.sync_playwright() as running:
        found = running.chromium.launch(executable_path=chromium, args=flags, headless=True)
        yield found
        found.close()


@pytest.fixture(scope="module")
def axe() -> Any:
    """The accessibility checks of axe-core."""
    module = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="axe-playwright-python is missing: make test-slow installs it"
    )
    return module.Axe()
