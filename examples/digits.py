"""Data for the examples: scikit-learn's handwritten digits, which come with it, as 32x32 images.

Every example imports this first. A torchvision that was built for another torch than the one at hand does not import by
itself, and timm, Lightning and Transformers import it; ``ready`` makes it importable and otherwise does nothing.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from betternorm.integrations import torchvision as torchvision_support

torchvision_support.ready()


def loaders(train_examples: int = 500, val_examples: int = 400, batch_size: int = 50) -> tuple[DataLoader, DataLoader]:
    """Training and validation data; few training images, so that a network overfits."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
    images = F.interpolate(images, size=32, mode="bilinear").expand(-1, 3, -1, -1)
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, val = order[:train_examples], order[train_examples : train_examples + val_examples]
    return (
        DataLoader(TensorDataset(images[train], labels[train]), batch_size, shuffle=True, drop_last=True),
        DataLoader(TensorDataset(images[val], labels[val]), 256),
    )
