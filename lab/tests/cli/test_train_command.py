"""The command: every field of a configuration is an option, a result is a table, and a mistake is one line."""

from dataclasses import fields

import pandas
import pytest
from betternorm_lab.store import Store
from betternorm_lab.training import Config

from betternorm.cli.main import main

QUICK = ["--width", "4", "--blocks", "1", "1", "--epochs", "1", "--steps-per-epoch", "3", "--batch-size", "32"]
QUICK += ["--threads", "1", "--quiet"]


def train(folder, *words):
    return main(["train", *QUICK, "--output", str(folder), *words])


def test_options_become_the_configuration(tmp_path, capsys):
    words = "--norm batch_group --norm-option num_groups=2 --norm-option examples_per_group=4 --no-augment"
    words += " --norm-decay 0.001 --gamma-target 1 --classes 5 --milestones 0.3 0.6 --schedule step --seed 7"
    assert train(tmp_path, *words.split()) == 0
    (row,) = Store(tmp_path).rows()
    expected = Config(
        width=4,
        blocks=(1, 1),
        epochs=1,
        steps_per_epoch=3,
        batch_size=32,
        norm="batch_group",
        norm_options={"num_groups": 2, "examples_per_group": 4},
        augment=False,
        norm_decay=0.001,
        gamma_target=1,
        classes=5,
        milestones=(0.3, 0.6),
        schedule="step",
        seed=7,
    )
    assert row.key == expected.key
    assert row["parameters"] > 0
    shown = capsys.readouterr().out
    assert f"{100 * row['test_top1']:.2f}" in shown
    assert f"{row['validation_cross_entropy_tuned']:.4f}" in shown
    assert row.key in shown


def test_every_field_has_its_option_and_help(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["train", "--help-all"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    for item in fields(Config):
        flag = "--norm-option" if item.name == "norm_options" else f"--{item.name.replace('_', '-')}"
        assert flag in shown, flag


def test_the_settings_of_a_row_run_it_again_and_options_given_win(tmp_path, capsys):
    """From the store to a file and back: the same trial, and with another seed another one."""
    words = "--norm batch_group --norm-option num_groups=2 --norm-option examples_per_group=4 --no-augment --test"
    assert train(tmp_path, *words.split(), "--norm-decay", "0.001", "--milestones", "0.3", "0.6") == 0
    (row,) = Store(tmp_path).rows()
    capsys.readouterr()
    assert main(["report", str(tmp_path), "--config-of", row.key]) == 0
    file = tmp_path / "row.json"
    file.write_text(capsys.readouterr().out)
    same = ["--config", str(file), "--output", str(tmp_path), "--quiet", "--threads", "1"]
    assert main(["train", *same]) == 0
    assert [found.key for found in Store(tmp_path).rows()] == [row.key]
    assert Store(tmp_path).get(row.key).attempts == 1
    assert main(["train", "--seed", "5", *same]) == 0
    other = Store(tmp_path).rows()[1]
    assert other.config == row.config | {"seed": 5}


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.json", '{"widht": 4}', "unrecognized arguments: --widht=4"),
        ("a.json", '{"width": "wide"}', "argument --width: invalid int value: 'wide'"),
        ("a.json", "[1, 2]", "contains no settings"),
        ("a.json", '{"width": 4', "is not JSON: "),
        ("a.toml", "width = ", "is not TOML: "),
        ("b.json", None, "cannot be read: No such file or directory"),
    ],
)
def test_a_file_of_options_that_cannot_be_used(tmp_path, capsys, name, text, said):
    if text is not None:
        (tmp_path / name).write_text(text)
    try:
        status = train(tmp_path / "out", "--config", str(tmp_path / name))
    except SystemExit as ended:  # by the parser
        status = ended.code
    assert status == 2
    assert said in capsys.readouterr().err


def test_toml_says_the_same(tmp_path):
    pytest.importorskip("tomllib")
    file = tmp_path / "ghost.toml"
    file.write_text('norm = "ghost"\nblocks = [1, 1]\naugment = false\nseed = [3]\n[norm_options]\nghost_size = 8\n')
    assert train(tmp_path / "out", f"--config={file}") == 0
    (row,) = Store(tmp_path / "out").rows()
    assert (row["norm"], row["norm_options"], row["augment"], row["seed"]) == ("ghost", [["ghost_size", 8]], False, 3)


def test_several_seeds_are_one_table_with_their_spread(tmp_path, capsys):
    file = tmp_path / "rows.csv"
    assert train(tmp_path, "--seed", "0", "1", "--norm-decay", "all", "--export", str(file)) == 0
    rows = Store(tmp_path).rows()
    assert [row["seed"] for row in rows] == [0, 1]
    mean = 50 * sum(row["test_top1"] for row in rows)
    assert f"{mean:.2f} ± " in capsys.readouterr().out
    assert pandas.read_csv(file)["seed"].tolist() == [0, 1]


def test_given_again_it_shows_the_result_and_trains_nothing(tmp_path, capsys):
    assert train(tmp_path) == 0
    first = capsys.readouterr().out
    assert train(tmp_path) == 0
    assert capsys.readouterr().out == first
    assert Store(tmp_path).rows()[0].attempts == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--norm gohst", "norm is 'gohst'; it must be one of batch"),
        ("--norm-option ghost_size", "--norm-option is 'ghost_size'; write it as NAME=VALUE"),
        ("--dataset svhn --data-root nowhere", "dataset svhn (SVHN) is missing or incomplete in"),
        ("--batch-size 5000", "batch_size is 5000; the training split has 1079"),
        ("--learning-rate 1e30", "the loss is nan at step"),
        ("--epochs 0", "epochs is 0; it must be 1 or more"),
        ("--export rows.xlsx", "it must end in .csv or .parquet"),
        ("--output /proc/nowhere", "output folder /proc/nowhere cannot be written"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, capsys, words, said):
    assert train(tmp_path, *words.split()) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("betternorm train: ")
    assert said in shown
    assert shown.count("\n") == 1


def test_one_seed_that_fails_does_not_hide_the_others(tmp_path, capsys, monkeypatch):
    run = Config.run

    def fails_for_one(self, *arguments):
        if self.seed == 1:
            raise MemoryError("too large")
        return run(self, *arguments)

    monkeypatch.setattr(Config, "run", fails_for_one)
    assert train(tmp_path, "--seed", "0", "1") == 1
    shown = capsys.readouterr().out
    assert "seed 1 failed: MemoryError: too large" in shown
    assert f"{100 * Store(tmp_path).rows()[0]['test_top1']:.2f}" in shown
