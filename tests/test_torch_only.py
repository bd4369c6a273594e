"""The library needs torch only: with NumPy and Pillow blocked, the README's example and the command line work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_readme_and_the_command_line_work_without_numpy_and_pillow(tmp_path: Path) -> None:
    words = [sys.executable, str(ROOT / "tests/torch_only.py"), "--block", str(ROOT / "README.md"), str(tmp_path)]
    result = subprocess.run(words, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("imported: []\n")
