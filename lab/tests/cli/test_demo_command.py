"""``betternorm demo`` and ``betternorm report`` as they are typed."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from betternorm_lab import demo
from betternorm_lab.store import Store

from betternorm.cli import BAD_INPUT, OK
from betternorm.cli.main import main
from tests.test_demo import MEASURED, fill


def test_the_demo_prints_its_tables_and_names_the_page(tmp_path, capsys):
    fill(tmp_path)
    assert main(["demo", "--output", str(tmp_path), "--seeds", "3", "--quiet"]) == OK
    said = capsys.readouterr().out
    for words in ("three of the four", "batch norm", "all three", "+2.17 [", "3 of 3", "+ decay on gamma and beta"):
        assert words in said
    assert said.rstrip().endswith(str(tmp_path / "report.html"))
    assert "Added one at a time" in (tmp_path / "report.html").read_text()


def test_no_gain_is_told_and_no_error(tmp_path, capsys):
    worse = [(top1 - 0.02, loss) for top1, loss in MEASURED[demo.PLAIN]]
    fill(tmp_path, MEASURED | {demo.DECAYED: worse})
    assert main(["demo", "--output", str(tmp_path), "--seeds", "3"]) == OK
    assert "opposite effect: All three techniques together" in capsys.readouterr().out


def test_for_machines_there_is_json(tmp_path, capsys):
    fill(tmp_path)
    assert main(["demo", "--output", str(tmp_path), "--seeds", "3", "--json"]) == OK
    found = json.loads(capsys.readouterr().out)
    assert found["page"] == str(tmp_path / "report.html")
    assert found["tables"][0]["rows"][3] == ["seeds improved", "3 of 3", "3 of 3"]
    assert found["verdicts"][0]["outcome"] == "replicated"


@pytest.mark.parametrize("words", [["--seeds", "1"], ["--seeds", "two"], ["--processes", "0"]])
def test_bad_usage_is_one_line(tmp_path, capsys, words):
    try:
        status = main(["demo", "--output", str(tmp_path), *words])
    except SystemExit as stopped:  # argparse's own
        status = stopped.code
    assert status == BAD_INPUT
    assert "Traceback" not in capsys.readouterr().err


def test_the_report_of_a_demo_is_a_page_and_files(tmp_path, capsys):
    fill(tmp_path)
    out, folder = tmp_path / "page.html", tmp_path / "files"
    assert main(["report", str(tmp_path), "--out", str(out), "--files", str(folder), "--title", "Mine"]) == OK
    said = capsys.readouterr().out
    assert "demo" in said
    assert said.split()[-2:] == [str(out), str(folder / "index.md")]
    assert "<h1>Mine</h1>" in out.read_text()
    assert (folder / "demo" / "figure-1.svg").is_file()


def test_the_report_for_machines(tmp_path, capsys):
    fill(tmp_path)
    assert main(["report", str(tmp_path), "--json"]) == OK
    found = json.loads(capsys.readouterr().out)
    assert found["written"] == [str(tmp_path / "report.html")]
    (told,) = found["experiments"]
    assert (told["name"], told["scale"]) == ("demo", "demo")
    assert told["verdicts"][0]["outcome"] == "replicated"


def test_a_store_on_a_read_only_disk_has_its_page_elsewhere(tmp_path, capsys, monkeypatch):
    store, out = tmp_path / "store", tmp_path / "page.html"
    fill(store)
    before = {path.name for path in store.iterdir()}
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, how: not Path(path).is_relative_to(store) and access(path, how))
    assert main(["report", str(store), "--out", str(out)]) == OK
    assert out.is_file()
    assert {path.name for path in store.iterdir()} <= before
    assert main(["report", str(store)]) == BAD_INPUT
    assert "cannot be written: Permission denied; choose another" in capsys.readouterr().err


def test_a_folder_without_a_store_is_refused_and_left_alone(tmp_path, capsys):
    assert main(["report", str(tmp_path / "nothing")]) == BAD_INPUT
    assert "has no store.sqlite" in capsys.readouterr().err
    assert not (tmp_path / "nothing").exists()


def test_a_store_without_results_is_refused(tmp_path, capsys):
    Store(tmp_path)
    assert main(["report", str(tmp_path)]) == BAD_INPUT
    assert "no finished trial" in capsys.readouterr().err


@pytest.mark.slow
def test_the_demo_really_trains_and_a_second_run_only_shows(tmp_path, capsys):
    words = ["demo", "--output", str(tmp_path), "--seeds", "2", "--quiet"]
    assert main(words) == OK
    first = capsys.readouterr().out
    store = Store(tmp_path)
    for seed in range(2):
        row = store.get(replace(demo.PLAIN, seed=seed).key)
        assert row["train_top1"] > 0.99  # overfits, as the notes say
        assert row["test_top1"] > 0.9
    attempts = [row.attempts for row in store.rows()]
    assert main(words) == OK
    assert capsys.readouterr().out == first
    assert [row.attempts for row in store.rows()] == attempts
