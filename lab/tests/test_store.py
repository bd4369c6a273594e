"""Acknowledged rows survive a killed process, and a failed write is one line."""

import contextlib
import os
import random
import resource
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pandas
import pytest
from betternorm_lab.store import DONE, FAILED, Row, Store, atomic

from betternorm.errors import UserError

CONFIG = {"norm": "ghost", "norm_options": [["ghost_size", 16]], "learning_rate": 0.1}


def test_a_row_comes_back_as_it_was_written(tmp_path):
    store = Store(tmp_path / "out")
    result = {"top1": 0.1 + 0.2, "table": [{"alpha": 0.0, "top1": 1 / 3}], "note": None}
    store.start("k", "training", CONFIG)
    assert store.get("k").status == "running"
    store.finish("k", "training", CONFIG, result=result, provenance={"seed": 3})
    row = Store(tmp_path / "out").get("k")
    assert row == Row("k", "training", DONE, CONFIG, result, None, {"seed": 3}, 1)
    assert row["top1"] == 0.30000000000000004
    assert row["norm"] == "ghost"
    assert store.get("absent") is None


def test_a_finished_row_is_never_written_again(tmp_path):
    store = Store(tmp_path)
    store.finish("k", "training", CONFIG, result={"top1": 1.0})
    store.start("k", "training", CONFIG)
    store.finish("k", "training", CONFIG, result={"top1": 2.0})
    store.finish("k", "training", CONFIG, error="no")
    assert store.get("k").result == {"top1": 1.0}
    assert store.get("k").status == DONE


def test_a_failed_row_keeps_its_error_until_it_succeeds(tmp_path):
    store = Store(tmp_path)
    store.start("k", "training", CONFIG)
    store.finish("k", "training", CONFIG, error="loss is nan")
    assert (store.get("k").status, store.get("k").error) == (FAILED, "loss is nan")
    store.start("k", "training", CONFIG)
    store.finish("k", "training", CONFIG, result={"top1": 1.0})
    assert (store.get("k").status, store.get("k").error, store.get("k").attempts) == (DONE, None, 2)


@pytest.mark.parametrize(("suffix", "read"), [(".csv", pandas.read_csv), (".parquet", pandas.read_parquet)])
def test_tables_for_others(tmp_path, suffix, read):
    store = Store(tmp_path)
    store.finish("a", "training", CONFIG, result={"top1": 1 / 3, "table": [1, 2]}, provenance={"seed": 1})
    store.finish("b", "training", CONFIG, result={"top1": 0.5, "table": []})
    store.finish("c", "other", CONFIG, result={})
    store.finish("d", "training", CONFIG, error="no")
    table = read(store.export(tmp_path / f"rows{suffix}", kind="training"))
    assert table["key"].tolist() == ["a", "b"]
    assert table["top1"].tolist() == [1 / 3, 0.5]
    assert table["table"].tolist() == ["[1, 2]", "[]"]
    assert table["norm_options"].tolist() == ['[["ghost_size", 16]]'] * 2
    assert store.frame(status=None)["status"].tolist() == [DONE, DONE, DONE, FAILED]
    with pytest.raises(UserError, match=r"it must end in \.csv or \.parquet"):
        store.export(tmp_path / "rows.xlsx")


def test_a_claim_excludes_others_and_ends_with_its_holder(tmp_path):
    store = Store(tmp_path)
    with store.claim("k") as mine, store.claim("k", wait=False) as also_mine:
        assert mine
        assert not also_mine
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    with holder:
        assert holder.stdout.readline() == "held\n"
        with store.claim("k", wait=False) as mine:
            assert not mine
        holder.send_signal(signal.SIGKILL)
        with store.claim("k") as mine:
            assert mine


HOLD = """
import sys, time
from betternorm_lab.store import Store
with Store(sys.argv[1]).claim("k"):
    print("held", flush=True)
    time.sleep(600)
"""

WRITE = """
import sys
from betternorm_lab.store import Store
store = Store(sys.argv[1])
print("open", flush=True)
for key in sys.stdin.read().split():
    store.start(key, "row", {"key": key})
    store.finish(key, "row", {"key": key}, result={"value": "x" * 200 + key})
    print(key, flush=True)
"""


@pytest.mark.parametrize(
    ("lanes", "rows", "segment", "kills"),
    [(3, 20, 20, 1), pytest.param(8, 500, 50, 8, marks=pytest.mark.slow)],
)
def test_every_acknowledged_row_is_there_once(tmp_path, lanes, rows, segment, kills):
    """Lanes of writers, each a chain of processes; one in ten is killed, and its lane goes on from what it knows."""
    acknowledged = [[] for _ in range(lanes)]
    segments = lanes * rows // segment
    doomed = set(random.Random(0).sample(range(segments), kills))
    killed = []

    def lane(number):
        keys = [f"{number}-{row}" for row in range(rows)]
        for start in range(0, rows, segment):
            die = number * rows // segment + start // segment in doomed
            while todo := [key for key in keys[: start + segment] if key not in acknowledged[number]]:
                writer = subprocess.Popen(
                    [sys.executable, "-c", WRITE, str(tmp_path)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
                with writer:
                    writer.stdin.write(" ".join(todo))
                    writer.stdin.close()
                    assert writer.stdout.readline() == "open\n"
                    for count, line in enumerate(writer.stdout):
                        acknowledged[number].append(line.strip())
                        if die and count >= segment // 3:
                            writer.send_signal(signal.SIGKILL)
                            killed.append(number)
                            die = False

    threads = [threading.Thread(target=lane, args=(number,)) for number in range(lanes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(killed) == kills
    found = [row.key for row in Store(tmp_path).rows()]
    told = [key for keys in acknowledged for key in keys]
    assert len(told) == len(set(told)) == lanes * rows
    assert sorted(found) == sorted(told)
    assert all(row.result["value"] == "x" * 200 + row.key for row in Store(tmp_path).rows())
    with sqlite3.connect(Store(tmp_path).path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_file_is_old_or_new_never_half(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with contextlib.suppress(RuntimeError), atomic(path) as draft:
        draft.write_text("ha")
        raise RuntimeError
    assert path.read_text() == "old"
    with atomic(path) as draft:
        draft.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["file"]


FILL = """
import sys
from betternorm.errors import UserError
from betternorm_lab.store import Store
try:
    store = Store(sys.argv[1])
    for number in range(10_000):
        store.finish(f"k{number}", "row", {}, result={"value": "x" * 2000})
        print(number, flush=True)
except UserError as problem:
    print(problem)
"""


def test_a_full_disk_is_one_line_and_loses_nothing(tmp_path):
    """A limit on the size of files stands for the disk."""
    limit = 300_000
    ran = subprocess.run(
        [sys.executable, "-c", FILL, str(tmp_path)],
        capture_output=True,
        text=True,
        preexec_fn=lambda: (
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN),
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        ),
        timeout=300,
    )
    *told, problem = ran.stdout.splitlines()
    assert ran.returncode == 0, ran.stderr
    assert "store.sqlite cannot be used" in problem
    assert "rows that were already stored are kept" in problem
    assert len(told) > 10
    assert len(Store(tmp_path).rows()) >= len(told)


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file" / "out", "/proc/nowhere"):
        with pytest.raises(UserError, match=r"cannot be written: .*; choose another"):
            Store(folder)


READ = """
import os, sys
from betternorm.errors import UserError
from betternorm_lab.store import Store
if os.getuid() == 0:  # who may write everywhere
    os.setuid(65534)
store = Store(sys.argv[1])
print([row.key for row in store.rows()])
try:
    store.finish("b", "training", {})
except UserError as problem:
    print(problem)
"""


@pytest.mark.parametrize("log", [False, True])
def test_a_folder_that_cannot_be_written_can_be_read(log, request):
    """By somebody else, and with the log that a killed writer left."""
    place = tempfile.TemporaryDirectory()  # pytest keeps tmp_path for itself
    request.addfinalizer(place.cleanup)
    os.chmod(place.name, 0o755)
    folder = Path(place.name) / "out"
    Store(folder).finish("a", "training", CONFIG, result={"top1": 1.0})
    writer = sqlite3.connect(folder / "store.sqlite")
    if log:
        writer.execute("SELECT * FROM trials").fetchall()  # who has it open keeps the log
    else:
        writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        writer.close()
        for name in ("store.sqlite-wal", "store.sqlite-shm"):
            (folder / name).unlink(missing_ok=True)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert ("store.sqlite-wal" in before) == log
    for path in (*folder.iterdir(), folder):
        path.chmod(0o555)
    ran = subprocess.run([sys.executable, "-c", READ, str(folder)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    keys, problem = ran.stdout.splitlines()
    assert keys == "['a']"
    assert "attempt to write a readonly database" in problem
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    folder.chmod(0o755)
    writer.close()


def test_a_file_that_is_no_store(tmp_path):
    (tmp_path / "store.sqlite").write_text("something else entirely, long enough to have a header " * 10)
    with pytest.raises(UserError, match="cannot be used: file is not a database"):
        Store(tmp_path)


def test_threads_share_a_store(tmp_path):
    store = Store(tmp_path)

    def write(number):
        for row in range(20):
            store.finish(f"{number}-{row}", "row", {}, result={})

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    deadline = time.monotonic() + 60
    while len(store.rows()) < 80 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(store.rows()) == 80
