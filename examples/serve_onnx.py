"""Serving: alpha in the three layers that gain most by it, everything else folded, and an ONNX file at the end."""

from pathlib import Path

import onnxruntime
import torch
from digits import loaders
from timm import create_model
from torch.nn import functional as F

import betternorm


def main(epochs: int = 10, path: str = "digits.onnx") -> Path:
    torch.manual_seed(0)
    train, val = loaders(batch_size=50)
    model = create_model("resnet10t", num_classes=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(epochs):
        for images, labels in train:
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()

    # These few images may be too few for a significant gain. Leave `require_significant` out for a real model.
    found = betternorm.tune_alpha(model, val, layers=3, require_significant=False)
    print(found)

    betternorm.fold(model, verbose=True)  # prints where every layer went; the model is for serving now

    images = next(iter(val))[0]
    batch = torch.export.Dim("batch", min=1)
    torch.onnx.export(model, (images[:2],), path, dynamo=True, verbose=False, dynamic_shapes=({0: batch},))

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (served,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
    with torch.inference_mode():
        torch.testing.assert_close(torch.from_numpy(served), model(images), rtol=1e-4, atol=1e-4)
    print(f"{path}: the same answers, from onnxruntime, for any batch size")
    return Path(path)


if __name__ == "__main__":
    main()
