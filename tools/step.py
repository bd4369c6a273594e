"""Run a command of the set-up: a line that says what is done, a sign of life every few seconds, its output if it fails.

python tools/step.py "installing torch" pip install torch
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time

EVERY = 5  # seconds


def main(what: str, *command: str) -> int:
    started = time.monotonic()
    print(f"{what} ...", flush=True)
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        while True:
            try:
                status = process.wait(EVERY)
                break
            except subprocess.TimeoutExpired:
                print(f"  {time.monotonic() - started:.0f} s", flush=True)
        if status:
            output.seek(0)
            sys.stderr.write(output.read())
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
