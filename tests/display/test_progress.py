"""The bar tells how far work has come and how long it will take, to whoever watches."""

import pytest

from betternorm.display import progress
from betternorm.display.progress import Bar, clock, track


@pytest.fixture
def watch(monkeypatch):
    """A clock that the test moves."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def last_line(capsys) -> str:
    """Standard error is no terminal here."""
    return capsys.readouterr().err.strip().rpartition("\n")[2]


def test_time_left_is_what_the_work_so_far_says(watch, capsys):
    with Bar("reading", 10, show=True) as bar:
        watch[0] += 30
        bar.advance(3)
        assert last_line(capsys) == "reading ███████░░░░░░░░░░░░░░░░░  30%  3/10  1:10 left"


def test_work_done_before_says_nothing_about_the_time_left(watch, capsys):
    with Bar("training", 10, show=True, done=8) as bar:
        watch[0] += 30
        bar.advance()
        assert "90%  9/10  0:30 left" in last_line(capsys)


def test_without_a_total_it_counts(watch, capsys):
    with Bar("reading", show=True) as bar:
        watch[0] += 5
        bar.advance(2, note="loss 0.3")
        assert last_line(capsys) == "reading 2  0:05  loss 0.3"


def test_it_is_silent_where_nobody_watches(capsys):
    assert list(track(range(3), "reading")) == [0, 1, 2]
    assert capsys.readouterr().err == ""


def test_on_a_terminal_the_bar_is_drawn_over_itself(watch, capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with Bar("reading", 2) as bar:
        watch[0] += 0.2
        bar.advance()
        assert capsys.readouterr().err.startswith("\r\x1b[Kreading ")


def test_elsewhere_it_is_a_line_every_five_seconds(watch, capsys):
    with Bar("reading", 100, show=True) as bar:
        for _ in range(100):
            watch[0] += 0.2
            bar.advance()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 5  # at 5, 10, 15 and 20 seconds, and at the end
    assert not any("\x1b" in line for line in lines)


def test_track_takes_the_length_of_what_it_goes_through(capsys):
    assert list(track([7, 8], "reading", show=True)) == [7, 8]
    assert "100%  2/2" in last_line(capsys)


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (75, "1:15"), (3700, "1:01:40")])
def test_clock(seconds, text):
    assert clock(seconds) == text
