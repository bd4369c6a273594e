"""Where results live: one SQLite file in the output folder, a row for every trial.

Many processes write at once (write-ahead log, one short transaction per row); a process that is killed loses nothing it
was told was written; a finished row is never written again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from betternorm.errors import UserError

if TYPE_CHECKING:
    import pandas

PATIENCE = 60.0  # seconds to wait for another process's transaction; each takes milliseconds
RUNNING, DONE, FAILED = "running", "done", "failed"

SCHEMA = """
CREATE TABLE IF NOT EXISTS trials (
    key TEXT PRIMARY KEY,
    kind TEXT NOT NULL,
    status TEXT NOT NULL CHECK (status IN ('running', 'done', 'failed')),
    config TEXT NOT NULL,
    result TEXT NOT NULL DEFAULT '{}',
    error TEXT,
    provenance TEXT NOT NULL DEFAULT '{}',
    attempts INTEGER NOT NULL DEFAULT 0
) STRICT
"""


@dataclass(frozen=True)
class Row:
    """The stored state of a trial. ``row["top1"]`` looks in the result, then in the configuration."""

    key: str
    kind: str
    status: str
    config: dict[str, Any]
    result: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    provenance: dict[str, Any] = field(default_factory=dict)
    attempts: int = 0

    def __getitem__(self, name: str) -> Any:
        return self.result[name] if name in self.result else self.config[name]

    @property
    def reason(self) -> str:
        """Why the trial failed, in one line; empty if it did not."""
        return (self.error or "").partition("\n")[0]

    def flat(self) -> dict[str, Any]:
        """One level: configuration, result, and provenance under its own prefix."""
        provenance = {f"provenance_{name}": value for name, value in self.provenance.items()}
        names = {"key": self.key, "kind": self.kind, "status": self.status, "attempts": self.attempts}
        return names | {"error": self.error} | self.config | self.result | provenance


class Store:
    """The rows of an output folder. A folder on a read-only disk can be read.

    Examples::

        >>> store = Store("runs")
        >>> store.frame()[["norm", "seed", "validation_top1"]]
        >>> store.export("runs.csv")
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.path = self.folder / "store.sqlite"
        self._connection: sqlite3.Connection | None = None
        self._owner = 0
        self._read_only = self.path.is_file() and not (
            os.access(self.folder, os.W_OK) and os.access(self.path, os.W_OK)
        )
        if not self._read_only:
            make_folder(self.folder)
            with self._open() as connection:
                connection.execute(SCHEMA)

    def __reduce__(self) -> tuple[Any, ...]:
        return Store, (self.folder,)

    def trial_folder(self, key: str) -> Path:
        """The folder for the checkpoint and other files of a trial."""
        return self.folder / "trials" / key

    def __getitem__(self, key: str) -> Row:
        """The row of a trial that has been started."""
        row = self.get(key)
        if row is None:
            raise KeyError(f"{self.path} has no trial {key}")
        return row

    def get(self, key: str) -> Row | None:
        with self._open() as connection:
            found = connection.execute(f"SELECT {COLUMNS} FROM trials WHERE key = ?", (key,)).fetchone()
        return _row(found) if found else None

    def rows(self, *, kind: str | None = None, status: str | None = DONE) -> list[Row]:
        """In the order they were first started. ``status=None`` is all of them."""
        with self._open() as connection:
            found = connection.execute(
                f"SELECT {COLUMNS} FROM trials "
                "WHERE kind = ifnull(?, kind) AND status = ifnull(?, status) ORDER BY rowid",
                (kind, status),
            ).fetchall()
        return [_row(values) for values in found]

    def start(self, key: str, kind: str, config: dict[str, Any]) -> None:
        """Mark a trial as running. A finished trial stays finished."""
        with self._open() as connection:
            connection.execute(
                "INSERT INTO trials (key, kind, status, config, attempts) VALUES (?, ?, 'running', ?, 1) "
                "ON CONFLICT (key) DO UPDATE SET status = 'running', error = NULL, attempts = attempts + 1 "
                "WHERE status != 'done'",
                (key, kind, json.dumps(config)),
            )

    def finish(
        self,
        key: str,
        kind: str,
        config: dict[str, Any],
        *,
        result: dict[str, Any] | None = None,
        error: str | None = None,
        provenance: dict[str, Any] | None = None,
    ) -> None:
        """Write a result or an error to disk. The first result of a trial is kept."""
        status = DONE if error is None else FAILED
        with self._open() as connection:
            connection.execute(
                "INSERT INTO trials (key, kind, status, config, result, error, provenance, attempts) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, 1) ON CONFLICT (key) DO UPDATE SET status = excluded.status, "
                "result = excluded.result, error = excluded.error, provenance = excluded.provenance "
                "WHERE trials.status != 'done'",
                (
                    key,
                    kind,
                    status,
                    json.dumps(config),
                    json.dumps(result or {}),
                    error,
                    json.dumps(provenance or {}),
                ),
            )

    @contextlib.contextmanager
    def claim(self, key: str, wait: bool = True) -> Iterator[bool]:
        """Lock a trial for this process; yields whether it succeeded. The lock is released when the process dies."""
        folder = self.trial_folder(key)
        make_folder(folder)
        with open(folder / "lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                yield False
                return
            yield True

    def frame(self, *, kind: str | None = None, status: str | None = DONE) -> pandas.DataFrame:
        """A pandas table, a row for every trial."""
        import pandas

        return pandas.DataFrame([row.flat() for row in self.rows(kind=kind, status=status)])

    def export(self, path: str | os.PathLike[str], *, kind: str | None = None, status: str | None = DONE) -> Path:
        """Write the table as .csv or .parquet; values other than numbers and text are written as JSON."""
        return export(self.rows(kind=kind, status=status), path)

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """A connection of this process (connections do not survive a fork); its errors become one line."""
        try:
            if self._connection is None or self._owner != os.getpid():
                self._connection = _connect_to_read(self.path) if self._read_only else _connect(self.path)
                self._owner = os.getpid()
            yield self._connection
        except sqlite3.DatabaseError as problem:
            raise UserError(
                f"the store {self.path} cannot be used: {problem}; rows that were already stored are kept"
            ) from problem


def export(rows: Iterable[Row], path: str | os.PathLike[str]) -> Path:
    """Write rows in the format of :meth:`Store.export`."""
    import pandas

    path = Path(path)
    if path.suffix not in (".csv", ".parquet"):
        raise UserError(f"path is {str(path)!r}; it must end in .csv or .parquet")
    table = pandas.DataFrame([row.flat() for row in rows])
    for name in table.columns:
        if any(isinstance(value, list | dict) for value in table[name]):
            table[name] = [json.dumps(value) for value in table[name]]
    with atomic(path) as draft:
        table.to_csv(draft, index=False) if path.suffix == ".csv" else table.to_parquet(draft)
    return path


COLUMNS = "key, kind, status, config, result, error, provenance, attempts"


def _row(values: tuple[Any, ...]) -> Row:
    key, kind, status, config, result, error, provenance, attempts = values
    return Row(key, kind, status, json.loads(config), json.loads(result), error, json.loads(provenance), attempts)


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=PATIENCE, isolation_level=None, check_same_thread=False)
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            # Enabling the log needs exclusive access, for which SQLite does not wait by itself.
            connection.execute("PRAGMA journal_mode = WAL")
            break
        except sqlite3.OperationalError as problem:
            if "locked" not in str(problem) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
    connection.execute("PRAGMA synchronous = FULL")  # rows are on disk, not in a cache, when a write returns
    return connection


def _connect_to_read(path: Path) -> sqlite3.Connection:
    """Read-only, without creating files. SQLite must be told whether there is a write-ahead log."""
    log = path.with_name(f"{path.name}-wal")
    how = "mode=ro" if log.is_file() and log.stat().st_size else "immutable=1"
    return sqlite3.connect(f"{path.resolve().as_uri()}?{how}", uri=True, isolation_level=None, check_same_thread=False)


def make_folder(folder: Path) -> None:
    """Create an output folder; raises a one-line error if that is impossible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as problem:
        raise UserError(f"output folder {folder} cannot be written: {problem.strerror}; choose another") from problem


def write_text(path: Path, text: str) -> Path:
    """Write a text file in one step."""
    with atomic(path) as draft:
        draft.write_text(text, encoding="utf-8")
    return path


@contextlib.contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """A draft next to ``path`` that replaces it when complete and on disk: readers see the old file or the new one."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield draft
        with open(draft, "rb") as written:
            os.fsync(written.fileno())
        os.replace(draft, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as problem:
        raise UserError(f"{path} cannot be written: {problem.strerror}; the previous file is kept") from problem
    finally:
        draft.unlink(missing_ok=True)
