"""``betternorm tune`` from the shell's side: what goes in, what comes out, and what is refused."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import betternorm
from betternorm.cli import BAD_INPUT, FINDING, INTERRUPTED, OK
from betternorm.cli.main import main
from betternorm.cli.tune import WORSE
from betternorm.integrations.checkpoints import load_checkpoint
from betternorm.weighing.alpha import get_alpha
from betternorm.weighing.evaluation import Evaluations
from betternorm.weighing.result import AlphaSearch

Image = pytest.importorskip("PIL.Image")
pytest.importorskip("matplotlib")

MODEL = """
import torch
from torch import nn

def build(num_classes=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                         nn.Linear(6, num_classes))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model, its checkpoint and a validation set on which some alpha above 0 is clearly better."""
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(MODEL)
    model = built()
    pixels, labels = pictures(240)
    x = torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(40):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), torch.from_numpy(labels)).backward()
        optimizer.step()
    torch.save({"state_dict": model.state_dict()}, "net.pt")
    # Validation images are dimmer than those in training, each in its own measure: their own statistics know.
    dim = np.random.RandomState(1).uniform(0.2, 1, (240, 1, 1, 1))
    pixels, labels = pictures(240, seed=1)
    np.savez("val.npz", images=(pixels * dim).astype(np.uint8), labels=labels)
    return tmp_path


def built(source: str = MODEL) -> nn.Sequential:
    scope: dict[str, Any] = {}
    exec(source, scope)
    model: nn.Sequential = scope["build"]()
    return model


def pictures(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Stripes of three widths under noise."""
    random = np.random.RandomState(seed)
    labels = random.randint(0, 3, count)
    stripes = (np.arange(8) // (labels[:, None] + 1)) % 2
    pixels = 60 + 120 * stripes[:, None, :, None] + random.uniform(0, 60, (count, 8, 8, 3))
    return pixels.astype(np.uint8), labels


def needs_timm() -> None:
    if importlib.util.find_spec("timm") is None:  # importing it needs what the integration does first
        pytest.skip("timm is not installed")


def tune(*words: str, data: str = "val.npz") -> int:
    return main(
        ["tune", "net.py:build", "--checkpoint", "net.pt", "--data", data, "--mean", "0,0,0", "--std", "1,1,1", *words]
    )


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.startswith("__")}


def test_a_better_checkpoint_and_the_evidence_come_out(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files(folder)
    assert tune() == OK
    assert files(folder) - before == {"net-tuned.pt", "net-tuned.json", "net-tuned.svg"}
    found = AlphaSearch.load("net-tuned.json")
    assert get_alpha(load_checkpoint(built(), "net-tuned.pt")) == found.alpha > 0
    assert "<svg" in Path("net-tuned.svg").read_text()
    assert f"set alpha = {found.alpha:.4g}" in capsys.readouterr().out


TWO_LAYERS = MODEL.replace("nn.ReLU(),", "nn.ReLU(), nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6),")


def of_two_layers(*words: str) -> int:
    Path("two.py").write_text(TWO_LAYERS)
    torch.save(built(TWO_LAYERS).state_dict(), "two.pt")
    given = ["--data", "val.npz", "--mean", "0,0,0", "--std", "1,1,1", "--objective", "cross_entropy"]
    return main(["tune", "two.py:build", "--checkpoint", "two.pt", *given, *words])


def test_alpha_in_a_few_layers_is_written_with_the_folded_network(folder: Path) -> None:
    assert of_two_layers("--layers", "1", "--fold", "--no-require-significant") in (OK, WORSE)
    written = {"two-tuned.pt", "two-tuned.json", "two-tuned.svg", "two-tuned.pt2"}
    assert written < files(folder)
    model = betternorm.load(built(TWO_LAYERS), "two-tuned.pt").eval()
    alphas = get_alpha(model)
    assert isinstance(alphas, dict)
    assert sum(alpha > 0 for alpha in alphas.values()) == 1
    images = torch.rand(3, 3, 8, 8)
    program = torch.export.load("two-tuned.pt2").module()
    torch.testing.assert_close(program(images), model(images), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--layers", "0"], "--layers is 0; it must be 1 or more"),
        (["--layers", "99"], "layers=99 must lie between 1 and"),
        (["--layers", "1", "--per-layer"], "cannot be combined with per_layer"),
        (["--fold"], "--fold needs --layers"),
    ],
)
def test_impossible_layers_are_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    before = files(folder)
    assert tune(*words) == BAD_INPUT
    error = capsys.readouterr().err.strip()
    assert message in error
    assert "\n" not in error
    assert files(folder) == before


def test_a_network_with_nothing_to_fold_is_told_before_it_is_tuned(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune("--layers", "1", "--fold") == BAD_INPUT
    assert "only 1 layers can be folded, and all may get an alpha" in capsys.readouterr().err
    assert not Path("net-tuned.json").exists()


def test_folders_of_images_give_what_arrays_give(folder: Path) -> None:
    with np.load("val.npz") as file:
        for number, (pixels, label) in enumerate(zip(file["images"], file["labels"], strict=True)):
            Path("val", f"class{label}").mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(f"val/class{label}/{number}.png")
    assert tune("--grid", "3", "--no-require-significant", "--out", "a.pt") in (OK, FINDING, WORSE)
    words = ["--grid", "3", "--no-require-significant", "--out", "b.safetensors", "--workers", "1"]
    assert tune(*words, data="val") in (OK, FINDING, WORSE)
    one, other = AlphaSearch.load("a.json"), AlphaSearch.load("b.json")
    for row, same in zip(one.table, other.table, strict=True):
        assert row == pytest.approx(same, rel=1e-5)


def test_no_gain_is_a_finding_and_writes_no_checkpoint(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with np.load("val.npz") as file:
        np.savez(
            "chance.npz", images=file["images"][:60], labels=np.random.RandomState(2).permutation(file["labels"][:60])
        )
    Path("dull.py").write_text(MODEL.replace("nn.Linear(6, num_classes)", "nn.Linear(6, num_classes), nn.Softmax(1)"))
    words = ["--data", "chance.npz", "--mean", "0,0,0", "--std", "1,1,1", "--objective", "top5"]
    assert main(["tune", "dull.py:build", "--checkpoint", "net.pt", *words]) == FINDING
    assert "is not significant: alpha unchanged" in capsys.readouterr().out
    assert Path("net-tuned.json").exists()
    assert not Path("net-tuned.pt").exists()


def test_a_dry_run_says_what_it_would_do_and_writes_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files(folder)
    assert tune("--dry-run", "--max-examples", "50") == OK
    assert files(folder) == before
    said = capsys.readouterr().out
    assert "50 images from val.npz: mean 0,0,0, std 1,1,1 (as specified)" in said
    assert "would write: net-tuned.pt, net-tuned.json" in said


def test_alpha_is_chosen_on_shifted_images_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--shift", "contrast:3,brightness:1", "--shifted-data", "night.npz", "--max-clean-drop", "2"]
    with np.load("val.npz") as file:
        np.savez("night.npz", images=file["images"] // 3, labels=file["labels"])
    assert tune(*words) in (OK, WORSE)
    found = AlphaSearch.load("net-tuned.json")
    assert found.shifts is not None
    assert list(found.shifts.gains) == ["clean", "contrast:3", "brightness:1", "night.npz"]
    assert "over shifted data at a clean drop of at most 2" in capsys.readouterr().out
    assert not list(folder.glob("*.unfinished*"))


def test_json_is_printed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tune("--json", "--grid", "5") == OK
    assert AlphaSearch.from_dict(json.loads(capsys.readouterr().out)) == AlphaSearch.load("net-tuned.json")


def test_one_alpha_a_layer(folder: Path) -> None:
    assert tune("--per-layer", "--max-examples", "120") == OK
    found = AlphaSearch.load("net-tuned.json")
    assert found.per_layer is not None
    assert set(found.per_layer.alphas) == {"1"}


def test_an_interrupted_command_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune("--out", "whole.pt") == OK
    measure, calls = Evaluations.measure, []

    def interrupted(self: Any, batches: Any) -> Any:
        calls.append(batches)
        if len(calls) == 23:
            raise KeyboardInterrupt
        return measure(self, batches)

    monkeypatch.setattr(Evaluations, "measure", interrupted)
    assert tune() == INTERRUPTED
    assert capsys.readouterr().err.endswith("interrupted; run the same command again to continue\n")
    assert Path("net-tuned.unfinished").exists()
    assert tune() == OK
    assert AlphaSearch.load("net-tuned.json") == AlphaSearch.load("whole.json")
    assert (
        len(calls) <= 4 * AlphaSearch.load("whole.json").evaluations + 5
    )  # four batches; one is repeated, and one recognizes the model
    assert not Path("net-tuned.unfinished").exists()


def test_results_are_not_written_over_unasked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tune("--max-examples", "200") == OK
    assert tune("--max-examples", "200") == BAD_INPUT
    assert "net-tuned.pt exists; pass --force" in capsys.readouterr().err
    assert tune("--max-examples", "200", "--force") == OK


def test_a_metric_that_is_worse_is_in_the_output_the_json_and_the_exit_code(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune("--grid", "3") == WORSE
    found = AlphaSearch.load("net-tuned.json")
    assert found.significant
    assert found.worse == ["top1"]
    gain = found.gains["top1"]
    said = f"top1 is worse: {100 * gain.difference:+.2f} points ({100 * gain.low:+.2f} to {100 * gain.high:+.2f})"
    assert said in capsys.readouterr().out


def test_a_network_that_is_right_on_everything_has_no_temperature(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with np.load("val.npz") as file:
        model = load_checkpoint(built(), "net.pt").eval()
        x = torch.from_numpy(file["images"]).permute(0, 3, 1, 2) / 255
        np.savez("easy.npz", images=file["images"], labels=model(x).argmax(1).numpy())
    before = files(folder)
    assert tune(data="easy.npz") == BAD_INPUT
    said = capsys.readouterr().err.strip()
    assert "nearly all examples are classified correctly" in said
    assert "\n" not in said
    assert files(folder) == before


def test_the_temperature_is_written_into_the_checkpoint(folder: Path) -> None:
    assert tune("--fold-temperature") == OK
    found = AlphaSearch.load("net-tuned.json")
    assert (found.temperature_folded_into, found.temperature) != ("5", None)
    folded, plain = torch.load("net-tuned.pt", weights_only=True), torch.load("net.pt", weights_only=True)["state_dict"]
    torch.testing.assert_close(folded["5.weight"] * found.temperature, plain["5.weight"])


def bad_image(folder: Path) -> None:
    for name in "abc":
        Path("bad", name).mkdir(parents=True)
    Path("bad/a/1.png").write_bytes(b"not a picture")


def empty(folder: Path) -> None:
    Path("bad").mkdir()


def unlabeled(folder: Path) -> None:
    Path("bad").mkdir()
    Image.new("RGB", (8, 8)).save("bad/1.png")


def without_labels(folder: Path) -> None:
    np.savez("bad.npz", images=np.zeros((4, 8, 8, 3), np.uint8))


def out_of_range(folder: Path) -> None:
    np.savez("bad.npz", images=np.zeros((4, 8, 8, 3), np.uint8), labels=np.array([0, 1, 2, 3]))


def too_many_folders(folder: Path) -> None:
    for name in "abcd":
        Path(f"bad/{name}").mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(f"bad/{name}/1.png")


def different_sizes(folder: Path) -> None:
    for name in "abc":
        Path("bad", name).mkdir(parents=True)
    for side in (8, 9):
        Image.new("RGB", (side, side)).save(f"bad/a/{side}.png")


def garbage(folder: Path) -> None:
    Path("bad.npz").write_bytes(b"PK garbage")


@pytest.mark.parametrize(
    ("made", "data", "message"),
    [
        (bad_image, "bad", "1.png cannot be read as an image"),
        (empty, "bad", "there are no images"),
        (unlabeled, "bad", "1.png is outside of any class"),
        (without_labels, "bad.npz", "images and no labels: unlabeled images"),
        (out_of_range, "bad.npz", "labels run from 0 to 3, and the model has 3 outputs"),
        (too_many_folders, "bad", "labels run from 0 to 3, and the model has 3 outputs"),
        (different_sizes, "bad", "different sizes: pass the size that the model expects with --size"),
        (garbage, "bad.npz", "cannot be read as .npz"),
        (lambda folder: None, "nowhere.npz", "there is no such file"),
        (lambda folder: None, "nowhere", "nowhere: there is no such file or folder, and the datasets are"),
        (lambda folder: None, "net.py", "expected a folder with one folder per class, an .npz"),
    ],
)
def test_unusable_data_is_one_line(
    made: Any, data: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made(folder)
    before = files(folder)
    assert tune(data=data) == BAD_INPUT
    said = capsys.readouterr().err.strip()
    assert message in said
    assert "\n" not in said
    assert files(folder) == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batch-size", "0"], "--batch-size is 0"),
        (["--max-examples", "0"], "--max-examples is 0"),
        (["--workers", "-1"], "--workers is -1"),
        (["--mean", "a,b"], "--mean is 'a,b'"),
        (["--std", "0,0,0"], "every number must be above 0"),
        (["--mean", "1,2"], "--mean has 2 numbers and --std 3"),
        (["--size", "0"], "--size is 0"),
        (["--device", "teapot"], "--device is 'teapot'"),
        (["--out", "x.onnx"], "has to end in .pt, .pth or .safetensors"),
        (["--out", "no/where.pt"], "there is no folder no"),
        (["--num-classes", "5"], "another architecture"),
        (["--checkpoint", "none.pt"], "there is no such file"),
        (["--folds", "1"], "folds=1 must be 2 or more"),
        (["--grid", "1"], "grid=1 must be 2 or more"),
        (["--ema"], "no averaged weights"),
        (["--shift", "rain"], "shift 'rain' is not known; known are noise"),
        (["--max-clean-drop", "1"], "pass --shift or --shifted-data too"),
        (["--shift", "fog:1", "--max-clean-drop", "-1"], "--max-clean-drop is -1"),
        (["--shifted-data", "nowhere.npz"], "there is no such file"),
        (["--shift", "fog:1", "--objective", "ece"], "'ece' is not a mean over examples"),
    ],
)
def test_impossible_options_are_one_line(
    words: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(folder)
    assert tune(*words) == BAD_INPUT
    said = capsys.readouterr().err.strip()
    assert message in said
    assert "\n" not in said
    assert files(folder) == before


def test_a_model_without_declared_preprocessing_needs_mean_and_std(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", "net.py:build", "--checkpoint", "net.pt", "--data", "val.npz"]) == BAD_INPUT
    assert "pass --mean and --std for" in capsys.readouterr().err


def test_a_timm_model_with_a_dataset_of_the_lab(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    needs_timm()
    from betternorm.integrations.models import load_model

    monkeypatch.chdir(tmp_path)
    torch.save(load_model("timm:test_resnet", num_classes=10).state_dict(), "net.pt")
    words = ["--num-classes", "10", "--checkpoint", "net.pt", "--data", "stand-in:cifar10", "--max-examples", "40"]
    assert main(["tune", "timm:test_resnet", *words, "--grid", "2"]) in (OK, FINDING)
    assert AlphaSearch.load("net-tuned.json").examples == 40


@pytest.mark.parametrize(
    ("spec", "size", "mean"),
    [
        ("timm:resnet18", (224, 224), 0.485),
        ("torchvision:resnet18", (224, 224), 0.485),
        ("timm:inception_v3", (299, 299), 0.5),
    ],
)
def test_preprocessing_is_what_the_model_declares(spec: str, size: tuple[int, int], mean: float) -> None:
    needs_timm()
    from betternorm.integrations.models import load_model
    from betternorm.integrations.preprocessing import preprocessing

    how = preprocessing(spec, load_model(spec))
    assert (how.size, how.mean[0]) == (size, mean)
    assert how(Image.new("RGB", (640, 480), "white")).shape == (3, *size)


def test_old_option_names_work_with_a_notice(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tune("--dry-run", "--limit", "50", "--insist") == OK
    seen = capsys.readouterr()
    assert "50 images from" in seen.out
    assert "--limit is deprecated; use --max-examples" in seen.err
    assert "--insist is deprecated; use --no-require-significant" in seen.err
