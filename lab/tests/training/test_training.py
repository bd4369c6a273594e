"""Training: bitwise identical however often it is killed, the same weights on two processes, verifiable numbers."""

import contextlib
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from betternorm_lab import data, training, trials
from betternorm_lab.store import Store
from betternorm_lab.training import Config, checkpoints
from betternorm_lab.trials import Runtime
from torch import nn

from betternorm.errors import UserError

HERE = Runtime(threads=1, accelerator="cpu", show=False)
SMALL = Config(width=4, blocks=(1, 1), epochs=2, batch_size=64, learning_rate=0.05, validate_every=0, steps_per_epoch=6)


def weights(folder):
    return torch.load(Path(folder) / "model.pt", weights_only=True)["model"]


def assert_same_weights(first, second):
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


# What comes out -----------------------------------------------------------------------------------------------------


def test_a_run_learns_and_its_row_holds_every_number(tmp_path):
    config = replace(SMALL, epochs=6, steps_per_epoch=None, width=8, learning_rate=0.1, validate_every=2)
    result = training.train(config, tmp_path, HERE)
    assert result["steps"] == 6 * 16
    assert result["validation_top1"] > 0.5
    assert result["test_top1"] > 0.5
    assert len(result["history"]) == 6
    assert [index for index, line in enumerate(result["history"]) if "validation_top1" in line] == [1, 3, 5]
    for split in ("validation", "test"):
        for name in training.JUDGED_BY:
            assert math.isfinite(result[f"{split}_{name}"])
            assert math.isfinite(result[f"{split}_{name}_tuned"])
    assert result["validation_cross_entropy_tuned"] <= result["validation_cross_entropy"]
    assert {row["alpha"] for row in result["alpha_table"]} >= {0.0, 1.0}
    assert json.loads(json.dumps(result)) == result
    assert sorted(os.listdir(tmp_path)) == ["model.pt"]


@pytest.mark.parametrize("norm", ["batch", "ghost", "group"])
def test_the_network_left_behind_gives_the_numbers_of_the_row(tmp_path, norm):
    config = replace(SMALL, norm=norm, norm_options={"num_groups": 2} if norm == "group" else ())
    result = training.train(config, tmp_path, HERE)
    model = training.trained(config, tmp_path)
    digits = data.load()
    images, labels = next(iter(data.Loader(digits, digits.test, len(digits.test))))
    with torch.no_grad():
        logits = model(images)
    assert (logits.argmax(1) == labels).double().mean().item() == pytest.approx(result["test_top1_tuned"])
    probabilities = torch.log_softmax(logits.double(), 1).gather(1, labels[:, None])
    assert -probabilities.mean().item() == pytest.approx(result["test_cross_entropy_tuned"], rel=1e-5)


def test_without_tuning_there_is_no_alpha(tmp_path):
    result = training.train(replace(SMALL, tune_alpha=False, test=False), tmp_path, HERE)
    assert "alpha" not in result
    assert not any(name.startswith("test") for name in result)
    assert "validation_top1" in result
    assert isinstance(training.trained(replace(SMALL, tune_alpha=False, test=False), tmp_path), nn.Module)


def test_the_test_set_is_read_once_and_last(tmp_path, monkeypatch):
    read = []
    iterate = data.Loader.__iter__

    def noted(loader):
        names = {id(digits.train): "train", id(digits.validation): "validation", id(digits.test): "test"}
        read.append(names[id(loader.split)])
        return iterate(loader)

    digits = data.load("digits", None)
    monkeypatch.setattr(data, "load", lambda *_, **__: digits)
    monkeypatch.setattr(data.Loader, "__iter__", noted)
    training.train(replace(SMALL, validate_every=1), tmp_path, HERE)
    assert read.count("test") == 1
    assert read[-1] == "test"
    assert read[:2] == ["train", "validation"]


def test_a_step_is_sgd_on_the_cross_entropy(tmp_path):
    """Against a loop of its own: torch's SGD, the batches of the loader, the schedule by its formula."""
    config = replace(SMALL, tune_alpha=False, test=False, epochs=2, steps_per_epoch=4, nesterov=True)
    training.train(config, tmp_path, HERE)
    digits = data.load()
    model = training.build_model(config, digits).train()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.SGD(
        [{"params": decayed, "weight_decay": 5e-4}, {"params": rest}], lr=0.05, momentum=0.9, nesterov=True
    )
    loader = data.Loader(digits, digits.train, 64, train=True, steps=4)
    step = 0
    for epoch in range(2):
        loader.set_epoch(epoch)
        for images, labels in loader:
            for group in optimizer.param_groups:
                group["lr"] = 0.05 * 0.5 * (1 + math.cos(math.pi * step / 8))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            step += 1
    for name, value in model.state_dict().items():
        assert torch.allclose(weights(tmp_path)[name], value, atol=1e-6), name


def test_accumulated_gradients_are_those_of_the_whole_batch(tmp_path):
    """With ghost batches of the size of a part, parts and whole have the same statistics."""
    whole = replace(SMALL, norm="ghost", norm_options={"ghost_size": 16}, tune_alpha=False, test=False)
    training.train(whole, tmp_path / "whole", HERE)
    training.train(replace(whole, accumulate=4), tmp_path / "parts", HERE)
    first, second = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    for name in first:
        if "running" not in name and "tracked" not in name:
            assert torch.allclose(first[name], second[name], atol=1e-5), name


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"schedule": "cosine"}, [1.0, 0.5, 0.0]),
        ({"schedule": "constant"}, [1.0, 1.0, 1.0]),
        ({"schedule": "step"}, [1.0, 0.1, 0.01]),
        ({"schedule": "step", "milestones": (0.25,), "step_factor": 0.5}, [1.0, 0.5, 0.5]),
        ({"schedule": "constant", "warmup_epochs": 4}, [1 / 41, 1.0, 1.0]),
    ],
)
def test_schedules_at_the_start_the_middle_and_the_end(options, expected):
    config = Config(learning_rate=1.0, epochs=10, **options)
    found = [training.learning_rate(config, step, 10) for step in (0, 50, 99)]
    assert found == pytest.approx(expected, abs=2e-3)


def test_gamma_decays_toward_its_target(tmp_path):
    """With a learning rate that only decay can be seen in, gamma moves to 0 or to 1."""
    config = replace(
        SMALL, tune_alpha=False, test=False, weight_decay=1.0, norm_decay="all", epochs=10, schedule="constant"
    )
    for target in (0, 1):
        folder = tmp_path / str(target)
        training.train(replace(config, gamma_target=target), folder, HERE)
        gamma = weights(folder)["norm.weight"]
        assert (gamma - target).abs().mean() < 0.35


def test_fine_tuning_begins_from_another_trial(tmp_path):
    first = trials.run_trial(replace(SMALL, classes=4), tmp_path, HERE)
    tuned = replace(
        SMALL, finetune_from=f"trial:{first.key}", learning_rate=1e-9, weight_decay=0.0, epochs=1, steps_per_epoch=1
    )
    second = trials.run_trial(tuned, tmp_path, HERE)
    assert second.status == "done", second.error
    before, after = (weights(Store(tmp_path).trial_folder(row.key)) for row in (first, second))
    assert torch.allclose(before["stem.weight"], after["stem.weight"], atol=1e-6)
    assert before["head.weight"].shape == (4, 8)
    assert after["head.weight"].shape == (10, 8)


# Killed and started again -------------------------------------------------------------------------------------------

LONGER = replace(SMALL, epochs=8, steps_per_epoch=8, norm="ghost", norm_options={"ghost_size": 8}, validate_every=3)


def attempt(config, folder):
    trials.run_trial(config, folder, HERE)


def kill_soon_after_a_checkpoint(config, folder, delay):
    """Start the trial in a process of its own, and kill it once it has come further than it was."""
    checkpoint = Store(folder).trial_folder(config.key) / "checkpoint.pt"
    before = checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0
    process = multiprocessing.get_context("fork").Process(target=attempt, args=(config, folder))
    process.start()
    while process.is_alive() and not (checkpoint.exists() and checkpoint.stat().st_mtime_ns > before):
        time.sleep(0.001)
    time.sleep(delay)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_killed_three_times_it_ends_with_the_same_bits(tmp_path):
    attempt(LONGER, tmp_path / "calm")
    for delay in (0.0, 0.007, 0.019):
        kill_soon_after_a_checkpoint(LONGER, tmp_path / "wild", delay)
    attempt(LONGER, tmp_path / "wild")
    calm, wild = Store(tmp_path / "calm"), Store(tmp_path / "wild")
    assert calm.get(LONGER.key).result == wild.get(LONGER.key).result
    assert wild.get(LONGER.key).attempts == 4
    assert_same_weights(weights(calm.trial_folder(LONGER.key)), weights(wild.trial_folder(LONGER.key)))


COMMAND = [
    *(sys.executable, "-m", "betternorm.cli", "train", "--threads", "1", "--quiet", "--accelerator", "cpu"),
    *("--width", "8", "--blocks", "1", "1", "--epochs", "20", "--batch-size", "64", "--norm", "ghost"),
    *("--norm-decay", "all", "--gamma-target", "1", "--classes-per-batch", "4", "--validate-every", "5"),
]


@pytest.mark.slow
def test_the_command_killed_twenty_times_ends_with_the_same_bits(tmp_path):
    subprocess.run([*COMMAND, "--output", str(tmp_path / "calm")], check=True, capture_output=True)
    (calm,) = Store(tmp_path / "calm").rows()
    moment = random.Random(0)
    kills = 0
    while kills < 20:
        process = subprocess.Popen([*COMMAND, "--output", str(tmp_path / "wild")], stdout=subprocess.DEVNULL)
        begun = Store(tmp_path / "wild").get(calm.key)
        before = begun.attempts if begun else 0
        while process.poll() is None:  # until this attempt has begun, and then some
            row = Store(tmp_path / "wild").get(calm.key)
            if row is not None and row.attempts > before:
                break
            time.sleep(0.02)
        with contextlib.suppress(subprocess.TimeoutExpired):
            # Less than the whole each time, so that twenty kills fit in: where the run is finished it begins anew.
            process.wait(moment.uniform(0, calm.provenance["duration"] * 0.5))
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
        else:
            assert process.returncode == 0
            compare(tmp_path, calm)
            (tmp_path / "wild").rename(tmp_path / f"finished after {kills}")
    subprocess.run([*COMMAND, "--output", str(tmp_path / "wild")], check=True, capture_output=True)
    compare(tmp_path, calm)


def compare(folder, calm):
    (wild,) = Store(folder / "wild").rows()
    assert wild.key == calm.key
    assert wild.result == calm.result
    first, second = (weights(Store(folder / name).trial_folder(calm.key)) for name in ("calm", "wild"))
    assert_same_weights(first, second)


def test_random_numbers_of_all_kinds_are_in_the_checkpoint():
    before = checkpoints.random_state()
    drawn = [(torch.rand(1).item(), np.random.rand(), random.random()) for _ in range(2)]
    checkpoints.set_random_state(before)
    assert [(torch.rand(1).item(), np.random.rand(), random.random()) for _ in range(2)] == drawn


def test_an_interrupted_run_goes_on_where_it_was(tmp_path):
    config = replace(SMALL, epochs=4)
    seen = []

    def stop(part):
        seen.append(part)
        if part > 0.6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        training.train(config, tmp_path, HERE, stop)
    assert len(seen) == 15  # of 24 steps; the checkpoint is of step 12
    resumed = []
    result = training.train(config, tmp_path, HERE, resumed.append)
    assert len(resumed) == 12
    undisturbed = training.train(config, tmp_path / "undisturbed", HERE)
    assert result == undisturbed
    assert_same_weights(weights(tmp_path), weights(tmp_path / "undisturbed"))


# Several processes --------------------------------------------------------------------------------------------------


def test_two_processes_are_one_with_ghost_batches(tmp_path):
    """Statistics per process are ghost batches of the process's size; the moving averages agree as well."""
    common = ["--width", "4", "--blocks", "1", "1", "--epochs", "2", "--steps-per-epoch", "10", "--batch-size", "64"]
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "betternorm.cli", "train", *common, "--norm", "weighed", "--accelerator", "cpu", "--quiet"),
        *("--threads", "1", "--output", str(tmp_path / "two")),
    ]
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=600, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert ran.returncode == 0, ran.stderr
    (two,) = Store(tmp_path / "two").rows()
    assert two["steps"] == 20
    config = Config(
        width=4,
        blocks=(1, 1),
        epochs=2,
        steps_per_epoch=10,
        batch_size=64,
        norm="ghost",
        norm_options={"ghost_size": 32},
    )
    one = trials.run_trial(config, tmp_path / "one", HERE)
    first = weights(Store(tmp_path / "one").trial_folder(one.key))
    second = weights(Store(tmp_path / "two").trial_folder(two.key))
    for name in first:
        if not name.endswith("alpha"):
            assert torch.allclose(first[name].double(), second[name].double(), atol=1e-5), name
    for name in ("validation_cross_entropy", "test_cross_entropy", "train_loss"):
        assert two[name] == pytest.approx(one[name], abs=1e-4)


# Bad input ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"epochs": 0}, "epochs is 0; it must be 1 or more"),
        ({"batch_size": 10, "accumulate": 3}, "accumulate is 3; it must be a divisor of batch_size"),
        ({"learning_rate": -1.0}, "learning_rate is -1.0"),
        ({"schedule": "cosin"}, "schedule is 'cosin'; it must be one of cosine, step, constant"),
        ({"gamma_target": 2}, "gamma_target is 2"),
        ({"alpha_objective": "f1"}, "alpha_objective is 'f1'"),
        ({"label_smoothing": 1.0}, "label_smoothing is 1.0"),
    ],
)
def test_configurations_that_cannot_be(options, words):
    with pytest.raises(UserError, match=words):
        Config(**options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 2000}, "batch_size is 2000; the training split has 1079 examples"),
        ({"norm_decay": "some"}, "norm_decay is 'some'"),
        ({"gamma_target": 1}, "weight_decay is 0 in all groups with gammas"),
        ({"finetune_from": "nowhere.pt"}, r"checkpoint nowhere\.pt: there is no such file"),
        ({"finetune_from": "trial:0123"}, "there is no such file"),
        ({"precision": "3"}, "Lightning Fabric raised an error"),
        ({"learning_rate": 1e30}, r"the loss is nan at step \d+ \(epoch 0\) with learning rate .*e\+"),
        (
            {"network": f"{__file__}:wrong_network"},
            r"the network gives \(64, 3\) for 64 images; the labels of digits need",
        ),
    ],
)
def test_what_goes_wrong_says_so_in_one_line(tmp_path, options, words):
    with pytest.raises(UserError, match=words) as problem:
        training.train(replace(SMALL, **options), tmp_path, HERE)
    assert "\n" not in str(problem.value)


def wrong_network(num_classes):
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def test_a_checkpoint_of_another_configuration_is_refused_and_kept(tmp_path):
    training.train(SMALL, tmp_path, HERE)
    before = (tmp_path / "model.pt").read_bytes()
    with pytest.raises(UserError, match="belongs to another configuration"):
        training.train(replace(SMALL, seed=1), tmp_path, HERE)
    assert (tmp_path / "model.pt").read_bytes() == before
    (tmp_path / "model.pt").write_bytes(before[:1000])
    with pytest.raises(UserError, match="is not a checkpoint of this program"):
        training.train(SMALL, tmp_path, HERE)


FULL = """
import resource, signal, sys
from betternorm.cli.main import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from betternorm_lab import training  # what is compiled or cached on import is written before the limit
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
sys.exit(main(sys.argv[1:]))
"""


def test_a_full_disk_is_one_line_and_the_last_checkpoint_stays(tmp_path):
    config = replace(SMALL, width=16)
    folder = Store(tmp_path).trial_folder(config.key)

    def stop(part):
        if part > 0.6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trials.run_trial(config, tmp_path, HERE, progress=stop)
    before = (folder / "checkpoint.pt").read_bytes()
    assert len(before) > 100_000
    flags = ["--width", "16", "--blocks", "1", "1", "--epochs", "2", "--batch-size", "64", "--learning-rate", "0.05"]
    flags += ["--validate-every", "0", "--steps-per-epoch", "6", "--threads", "1", "--quiet", "--output", str(tmp_path)]
    ran = subprocess.run([sys.executable, "-c", FULL, "train", *flags], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 2, ran.stderr
    assert ran.stderr.count("\n") == 1
    assert "checkpoint.pt cannot be written" in ran.stderr
    assert (folder / "checkpoint.pt").read_bytes() == before
    assert trials.run_trial(config, tmp_path, HERE, retry=True).status == "done"


def test_a_bar_shows_loss_accuracy_speed_and_what_is_left(tmp_path, capsys, monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr("betternorm.display.progress.time.monotonic", lambda: next(clock))  # drawn at every step
    training.train(SMALL, tmp_path, replace(HERE, show=True))
    shown = capsys.readouterr().err
    assert "12/12" in shown
    assert re.search(r"left  epoch 2/2  loss \d\.\d{3}  top-1 [\d.]+%  [\d,]+ images/s", shown)


def test_curves_for_tensorboard_on_request(tmp_path):
    training.train(SMALL, tmp_path, replace(HERE, tensorboard=True))
    (file,) = (tmp_path / "tensorboard").iterdir()
    assert file.stat().st_size > 100


@pytest.mark.parametrize("options", [{"channels_last": True}, {"deterministic": False}])
def test_other_ways_of_running_give_the_same_network(tmp_path, options):
    training.train(SMALL, tmp_path / "plain", HERE)
    training.train(SMALL, tmp_path / "other", replace(HERE, **options))
    first, second = weights(tmp_path / "plain"), weights(tmp_path / "other")
    for name in first:
        assert torch.allclose(first[name].double(), second[name].double(), atol=1e-4), name


def test_half_precision_trains(tmp_path):
    result = training.train(replace(SMALL, precision="bf16-mixed"), tmp_path, HERE)
    assert math.isfinite(result["train_loss"])


def test_torch_is_left_as_it_was(tmp_path):
    training.train(SMALL, tmp_path, HERE)
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's compiler, about torch itself
def test_a_compiled_network_is_the_same_network(tmp_path):
    training.train(SMALL, tmp_path / "plain", HERE)
    training.train(SMALL, tmp_path / "compiled", replace(HERE, compile=True))
    first, second = weights(tmp_path / "plain"), weights(tmp_path / "compiled")
    assert first.keys() == second.keys()
    for name in first:
        assert torch.allclose(first[name].double(), second[name].double(), atol=1e-4), name
