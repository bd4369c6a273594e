"""torchvision: its models take a norm layer by themselves, so one of ours goes in without any conversion."""

from functools import partial

from digits import loaders
from torch import manual_seed, optim, randn
from torch.nn import functional as F
from torchvision.models import mobilenet_v2

import betternorm


def main(epochs: int = 10) -> betternorm.AlphaSearch:
    manual_seed(0)
    train, val = loaders(batch_size=50)
    model = mobilenet_v2(num_classes=10, width_mult=0.35, norm_layer=partial(betternorm.GhostBatchNorm, ghost_size=10))
    groups = betternorm.param_groups(model, weight_decay=5e-4, example_input=randn(4, 3, 32, 32))
    optimizer = optim.AdamW(groups, lr=2e-3)
    for _ in range(epochs):
        for images, labels in train:
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
    found = betternorm.tune_alpha(model, val)
    print(found)
    return found


if __name__ == "__main__":
    main()
