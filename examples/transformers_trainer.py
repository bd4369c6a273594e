"""Hugging Face Transformers: a ResNet there has BatchNorm; its Trainer gets our decay groups, and alpha at the end."""

import sys
import tempfile
from pathlib import Path

from digits import loaders
from torch import Tensor, manual_seed
from transformers import ResNetConfig, ResNetForImageClassification, Trainer, TrainingArguments

import betternorm
from betternorm.integrations.checkpoints import load_checkpoint
from betternorm.integrations.transformers import DecayWhereItActs, TuneAlpha


class OurTrainer(DecayWhereItActs, Trainer):
    """The Trainer, with weight decay on gamma and beta where it can act."""


def network() -> ResNetForImageClassification:
    return ResNetForImageClassification(
        ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", num_labels=10)
    )


def as_dicts(loader) -> list[dict[str, Tensor]]:
    """Examples as the Trainer wants them."""
    images, labels = loader.dataset.tensors
    return [{"pixel_values": image, "labels": label} for image, label in zip(images, labels, strict=True)]


def main(folder: str, epochs: int = 10) -> betternorm.AlphaSearch:
    manual_seed(0)
    train, val = map(as_dicts, loaders())
    model = betternorm.upgrade(network(), batch_size=50)
    tune = TuneAlpha()
    arguments = TrainingArguments(
        folder,
        num_train_epochs=epochs,
        per_device_train_batch_size=50,
        per_device_eval_batch_size=256,
        optim="sgd",
        learning_rate=0.1,
        weight_decay=5e-4,
        eval_strategy="epoch",
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=not sys.stderr.isatty(),
        dataloader_pin_memory=False,
    )
    trainer = OurTrainer(model, arguments, train_dataset=train, eval_dataset=val, callbacks=[tune])
    trainer.train()
    trainer.save_model(folder)  # alpha is inside

    again = load_checkpoint(network(), Path(folder) / "model.safetensors")
    assert betternorm.get_alpha(again) == betternorm.get_alpha(model)
    print(tune.found)
    return tune.found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
