"""timm: a model by name, its optimizer and schedule factories with our groups, its averaged weights, alpha at last."""

from functools import partial

from digits import loaders
from timm import create_model
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3
from torch import manual_seed, randn
from torch.nn import functional as F

import betternorm


def main(epochs: int = 10, name: str = "resnet10t") -> betternorm.AlphaSearch:
    manual_seed(0)
    train, val = loaders(batch_size=50)
    model = create_model(name, num_classes=10)
    model = betternorm.upgrade(model, batch_size=50)

    # timm's own rule is no decay for anything with one dimension; param_group_fn is where it takes another.
    groups = partial(betternorm.param_groups, weight_decay=5e-4, example_input=randn(4, 3, 32, 32))
    optimizer = create_optimizer_v2(model, opt="sgd", lr=0.05, momentum=0.9, param_group_fn=groups)
    scheduler, epochs = create_scheduler_v2(optimizer, sched="cosine", num_epochs=epochs)
    averaged = ModelEmaV3(model, decay=0.9)  # a copy: make it after conversion

    for epoch in range(epochs):
        for images, labels in train:
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            averaged.update(model)
        scheduler.step(epoch + 1)

    found = betternorm.tune_alpha(averaged.module, val)
    print(found)
    return found


if __name__ == "__main__":
    main()
