"""Running many trials: in this process, in a pool of local processes, or on a Ray cluster, with the same rows.

An engine only decides where a trial runs. The store and the trial itself ensure that a trial runs once, continues after
an interruption and keeps its error, so engines can be mixed and killed at any time.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from betternorm.display.progress import Bar
from betternorm.errors import UserError
from betternorm_lab.store import FAILED, RUNNING, Row, Store
from betternorm_lab.team import team_of, world_size
from betternorm_lab.trials import Runtime, Trial, check_machine, perform, run_trial, settled

ENGINES = ("here", "processes", "ray")
LIVES = 3  # a trial fails when its process has died this often
PRELOADED = ["betternorm_lab.training", "betternorm_lab.fabric"]
MOST_PER_CORE = 8  # processes of a pool; each has a model, a dataset and a copy of torch
REPORT_EVERY = 0.5  # seconds between a worker's reports


def run_trials(
    trials: Sequence[Trial],
    folder: str | os.PathLike[str],
    *,
    engine: str = "here",
    runtime: Runtime | None = None,
    workers: int | None = None,
    address: str | None = None,
    retry: bool = False,
    show: bool | None = None,
) -> list[Row]:
    """Run every trial that has no row yet, and return the rows in the order of ``trials``.

    Args:
        engine: "here" runs trials in this process, one after the other; "processes" uses a pool on this machine; "ray"
            uses a cluster whose machines have this package installed and ``folder`` at the same path.
        workers: processes of the pool (by default one per core), or of a Ray cluster started here.
        address: of a running Ray cluster; without it, one is started on this machine and stopped at the end.
        retry: run failed trials again.
        show: draw a progress bar; None draws one on a terminal.

    Ctrl-C stops immediately; interrupted trials continue from their checkpoints when they are run again.
    """
    if engine not in ENGINES:
        raise UserError(f"engine is {engine!r}; it must be one of {', '.join(ENGINES)}")
    if workers is not None and workers < 1:
        raise UserError(f"workers is {workers}; it must be 1 or more")
    runtime = runtime or Runtime()
    if engine != "here" and world_size(runtime) > 1:
        raise UserError(
            f"engine is {engine!r}, which gives each trial one process, and there are {world_size(runtime)} "
            "(devices times nodes, or as torchrun says); several on one trial need engine 'here'"
        )
    if engine != "ray":  # which uses other machines
        check_machine(runtime)
    store, team = Store(folder), team_of(runtime)
    wanted = list(dict.fromkeys(trials))
    todo = team.told_by_first(
        [trial for trial in wanted if not ((row := store.get(trial.key)) and settled(row, retry))]
    )
    alone = len(wanted) == 1 and engine == "here"
    inner = replace(runtime, show=runtime.show if alone else False)  # one progress bar, not nested ones
    with Watch(len(wanted), len(wanted) - len(todo), False if alone else show) as watch:
        if engine == "here":
            _here(todo, store, inner, retry, watch)
        elif engine == "processes":
            _processes(todo, store, inner, retry, watch, workers)
        else:
            _ray(todo, store, inner, retry, watch, workers, address)
    rows = team.told_by_first({} if team.rank else {trial: store[trial.key] for trial in wanted})
    return [rows[trial] for trial in trials]


class Watch:
    """Progress of the whole grid on one line."""

    def __init__(self, total: int, done: int, show: bool | None) -> None:
        self._bar = Bar("trials", total, show, done)
        self._parts: dict[str, float] = {}
        self._failed = 0

    def __enter__(self) -> Watch:
        self._bar.__enter__()
        return self

    def __exit__(self, *details: object) -> None:
        self._bar.__exit__(*details)

    def part(self, trial: Trial, part: float) -> None:
        self._parts[trial.key] = part
        self._bar.advance(0, self._note())

    def finished(self, trial: Trial, row: Row) -> None:
        self._parts.pop(trial.key, None)
        self._failed += row.status == FAILED
        self._bar.advance(1, self._note())

    def _note(self) -> str:
        running = ", ".join(f"{part:.0%}" for part in self._parts.values())
        words = [f"running: {running}"] if running else []
        return "  ".join(words + ([f"{self._failed} failed"] if self._failed else []))


# In this process ----------------------------------------------------------------------------------------------------


def _here(todo: Sequence[Trial], store: Store, runtime: Runtime, retry: bool, watch: Watch) -> None:
    busy = []
    for trial in todo:
        row = _run_here(trial, store, runtime, retry, watch, wait=False)
        if row.status == RUNNING:  # another program is running it: continue with the others
            busy.append(trial)
    for trial in busy:
        _run_here(trial, store, runtime, retry, watch, wait=True)


def _run_here(trial: Trial, store: Store, runtime: Runtime, retry: bool, watch: Watch, wait: bool) -> Row:
    row = run_trial(trial, store.folder, runtime, retry=retry, wait=wait, progress=lambda part: watch.part(trial, part))
    if row.status != RUNNING:
        watch.finished(trial, row)
    return row


# In a pool of local processes ---------------------------------------------------------------------------------------


def _processes(
    todo: Sequence[Trial], store: Store, runtime: Runtime, retry: bool, watch: Watch, workers: int | None
) -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = min(workers or cores, len(todo))
    if workers > MOST_PER_CORE * cores:
        raise UserError(f"workers is {workers}; it must be from 1 to {MOST_PER_CORE * cores} with {cores} cores")
    # As many threads as cores in total.
    runtime = replace(runtime, threads=runtime.threads or max(1, cores // max(1, workers)))
    queue, busy, deaths = deque(todo), deque[Trial](), dict.fromkeys(todo, 0)
    pool: list[_Worker] = []
    try:
        while queue or busy or any(worker.trial for worker in pool):
            for worker in pool:
                if worker.trial is None and (queue or busy):
                    worker.give(queue.popleft(), False) if queue else worker.give(busy.popleft(), True)
            while (queue or busy) and len(pool) < workers:
                pool.append(_Worker(store, runtime, retry))
                trial, patient = (queue.popleft(), False) if queue else (busy.popleft(), True)
                pool[-1].give(trial, patient)
            wait([item for worker in pool for item in (worker.pipe, worker.process.sentinel)], timeout=1.0)
            for worker in list(pool):
                given = worker.trial
                row = worker.receive(watch)
                if given is not None and row is not None:
                    if row.status == RUNNING:
                        busy.append(given)  # another program is running it: continue with the others
                    else:
                        watch.finished(given, row)
                elif not worker.process.is_alive():
                    pool.remove(worker)
                    _replace_dead_worker(worker, given, store, deaths, queue, watch)
    finally:
        for worker in pool:
            worker.process.terminate()
        for worker in pool:
            worker.stop()


def _replace_dead_worker(
    worker: _Worker, trial: Trial | None, store: Store, deaths: dict[Trial, int], queue: deque[Trial], watch: Watch
) -> None:
    """A worker died. Its trial continues from its checkpoint in another one, unless it has died too often."""
    code = worker.process.exitcode
    worker.stop()
    if trial is None:
        return
    deaths[trial] += 1
    if deaths[trial] < LIVES:
        queue.appendleft(trial)
        return
    error = f"its process died {LIVES} times, the last time with exit code {code}"
    store.finish(trial.key, trial.kind, trial.config, error=error)
    watch.finished(trial, store[trial.key])


class _Worker:
    """A process that runs one trial after the other, and the pipe to it."""

    def __init__(self, store: Store, runtime: Runtime, retry: bool) -> None:
        # Forked from a process that has imported everything and done nothing: quick, and no thread is lost in the fork.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.pipe, theirs = context.Pipe()
        # Not a daemon: daemons cannot have children, and a worker may start processes that read images.
        self.process = context.Process(target=_serve, args=(theirs, store.folder, runtime, retry), daemon=False)
        self.process.start()
        theirs.close()
        self.trial: Trial | None = None

    def give(self, trial: Trial, patient: bool) -> None:
        self.trial = trial
        with contextlib.suppress(OSError):  # already dead, which the next receive detects
            self.pipe.send((trial, patient))

    def receive(self, watch: Watch) -> Row | None:
        """Process its messages; returns the row if one has arrived."""
        try:
            while self.pipe.poll():
                message = self.pipe.recv()
                if isinstance(message, UserError):
                    raise message
                if isinstance(message, Row):
                    self.trial = None
                    return message
                if self.trial is not None:
                    watch.part(self.trial, message)
        except (EOFError, OSError):
            self.process.join(5)
        return None

    def stop(self) -> None:
        self.pipe.close()
        self.process.terminate()
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _serve(pipe: Connection, folder: Path, runtime: Runtime, retry: bool) -> None:
    """The loop of a worker, until its parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    last = 0.0

    def report(part: float) -> None:
        nonlocal last
        if time.monotonic() - last >= REPORT_EVERY:
            last = time.monotonic()
            with contextlib.suppress(OSError):  # the parent is gone, and this process will end as well
                pipe.send(part)

    with contextlib.suppress(EOFError, OSError):
        while True:
            trial, patient = pipe.recv()
            try:
                pipe.send(run_trial(trial, folder, runtime, retry=retry, wait=patient, progress=report))
            except UserError as problem:  # of the store, such as a full disk, which affects all workers
                pipe.send(problem)


def _leave_with_parent() -> None:
    """End this worker when its parent has ended; trials continue from their checkpoints."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


# On Ray -------------------------------------------------------------------------------------------------------------


def _ray(
    todo: Sequence[Trial],
    store: Store,
    runtime: Runtime,
    retry: bool,
    watch: Watch,
    workers: int | None,
    address: str | None,
) -> None:
    """Workers run trials and return their outcome; only this process claims them and writes to the store.

    SQLite's write-ahead log does not work across machines.
    """
    try:
        import ray
    except ImportError as problem:
        raise UserError(f"engine 'ray' needs Ray: pip install ray ({problem})") from problem
    threads = runtime.threads or 1
    with _cluster(ray, address, workers, threads):
        gpus = runtime.devices if ray.cluster_resources().get("GPU") and runtime.accelerator != "cpu" else 0
        task = ray.remote(perform).options(num_cpus=threads, num_gpus=gpus, max_retries=LIVES - 1)
        room = max(1, int(ray.cluster_resources().get("CPU", 1)) // threads)
        queue, busy = deque(todo), deque[Trial]()
        flying: dict[Any, tuple[Trial, contextlib.ExitStack]] = {}
        runtime = replace(runtime, threads=threads)
        try:
            while queue or busy or flying:
                while (queue or busy) and len(flying) < room:
                    trial, patient = (queue.popleft(), False) if queue else (busy.popleft(), not flying)
                    claim = contextlib.ExitStack()
                    if not claim.enter_context(store.claim(trial.key, wait=patient)):
                        busy.append(trial)
                        break
                    row = store.get(trial.key)
                    if row is not None and settled(row, retry):
                        claim.close()
                        watch.finished(trial, row)
                        continue
                    store.start(trial.key, trial.kind, trial.config)
                    place = store.trial_folder(trial.key).resolve()
                    flying[task.remote(trial, place, runtime)] = (trial, claim)
                ready, _ = ray.wait(list(flying), timeout=1.0) if flying else ([], None)
                for reference in ready:
                    trial, claim = flying.pop(reference)
                    try:
                        outcome = ray.get(reference)
                    except ray.exceptions.RayError as problem:
                        outcome = {"error": _said_by_ray(problem)}
                    store.finish(trial.key, trial.kind, trial.config, **outcome)
                    claim.close()
                    watch.finished(trial, store[trial.key])
        finally:
            for reference, (_, claim) in flying.items():
                ray.cancel(reference, force=True)
                claim.close()


def _said_by_ray(problem: Exception) -> str:
    """The error of a task that did not return; if Ray quotes a traceback, its last line."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    reason = lines[-1] if lines and lines[0].startswith("\x1b") else " ".join(lines[:1])
    return f"its process died or could not start: {type(problem).__name__}: {reason}"


@contextlib.contextmanager
def _cluster(ray: Any, address: str | None, workers: int | None, threads: int) -> Iterator[None]:
    """Connect to a cluster, or start one on this machine and stop it at the end."""
    if ray.is_initialized():
        yield
        return
    on_termination = signal.getsignal(signal.SIGTERM)
    try:
        if address:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        else:
            cpus = workers * threads if workers else None
            ray.init(num_cpus=cpus, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError) as problem:
        where = f"reached at {address}" if address else "started here"
        raise UserError(f"Ray cannot be {where}: {str(problem).splitlines()[0]}") from problem
    if callable(on_termination) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, on_termination)  # Ray replaces it with one that aborts
    try:
        yield
    finally:
        ray.shutdown()
