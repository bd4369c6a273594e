"""Lightning: one callback converts the network, regroups the optimizer, and tunes alpha when training ends."""

from digits import loaders
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn, optim
from torch.nn import functional as F

from betternorm.integrations.lightning import BetterNorm


class Classifier(LightningModule):
    """An ordinary module that knows nothing of betternorm."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
        )  # fmt: skip

    def forward(self, images):
        return self.network(images)

    def training_step(self, batch, index):
        images, labels = batch
        return F.cross_entropy(self(images), labels)

    def validation_step(self, batch, index):
        images, labels = batch
        self.log("accuracy", (self(images).argmax(1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        optimizer = optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
        return [optimizer], [optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.max_epochs)]


def main(epochs: int = 10) -> BetterNorm:
    seed_everything(0)
    train, val = loaders(batch_size=50)
    callback = BetterNorm(batch_size=50)
    trainer = Trainer(max_epochs=epochs, callbacks=[callback], accelerator="cpu", logger=False)
    trainer.fit(Classifier(), train, val)
    print(callback.found)
    return callback


if __name__ == "__main__":
    main()
