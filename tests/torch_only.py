"""A script for an environment with torch and nothing else: the README's Python lines, and the command line.

    python torch_only.py README.md FOLDER

With --block, NumPy and Pillow cannot be imported although they are installed.
"""

from __future__ import annotations

import re
import sys
import warnings
from pathlib import Path

if "--block" in sys.argv:
    for name in ("numpy", "PIL", "matplotlib"):
        sys.modules[name] = None  # type: ignore[assignment]
warnings.simplefilter("ignore")  # torch warns that NumPy is missing

import torch  # noqa: E402

import betternorm  # noqa: E402

NETS = """
from torch import nn

def build():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)
    )
"""


def main(readme: Path, folder: Path) -> None:
    names: dict[str, object] = {"__name__": "__main__"}
    exec(NETS, names)
    torch.manual_seed(0)
    model = names["build"]()  # type: ignore[operator]
    loader = [(torch.randn(32, 3, 16, 16), torch.arange(32) % 10) for _ in range(4)]
    names |= {"model": model.eval(), "train_loader": loader, "val_loader": loader, "torch": torch}
    names |= {"images": torch.rand(120, 3, 16, 16).sub(0.5).div(0.25), "mean": 0.5, "std": 0.25}
    mean, std = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)
    betternorm.fit_alpha.__kwdefaults__["steps"] = 4  # the README's line in seconds
    names |= {"images": (torch.rand(120, 3, 16, 16) - 0.5) / 0.25, "mean": mean, "std": std}
    blocks = re.findall(r"^```python\n(.*?)^```$", readme.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert any("tune_alpha" in block for block in blocks)
    for block in blocks:
        exec(block, names)

    from betternorm.cli.main import main as command_line

    (folder / "nets.py").write_text(NETS)
    torch.save(names["build"]().state_dict(), folder / "net.pt")  # type: ignore[operator]
    labels = torch.arange(120) % 10
    bytes_ = torch.randint(256, (120, 16, 16, 3), dtype=torch.uint8)
    torch.save({"images": bytes_, "labels": labels}, folder / "bytes.pt")
    torch.save((torch.randn(120, 3, 16, 16), labels), folder / "floats.pt")
    spec = f"{folder}/nets.py:build"
    for data, words in (("bytes.pt", ["--mean", "0.5,0.5,0.5", "--std", "0.25,0.25,0.25"]), ("floats.pt", [])):
        words = [*(words or ["--mean", "0,0,0", "--std", "1,1,1"]), "--out", f"{folder}/tuned-{data}", "--quiet"]
        status = command_line(["tune", spec, "--checkpoint", f"{folder}/net.pt", "--data", f"{folder}/{data}", *words])
        assert status in (0, 1, 3), status
        assert (folder / f"tuned-{data}").with_suffix(".json").exists()
    assert command_line(["inspect", spec, "--svg", f"{folder}/layers.svg"]) == 0
    present = [name for name in ("numpy", "PIL", "scipy", "torchvision", "timm") if sys.modules.get(name)]
    print("imported:", present)


if __name__ == "__main__":
    main(*(Path(word) for word in sys.argv[1:] if word != "--block"))
