"""Properties of the datasets: classes, image size, pixel statistics, file locations."""

from __future__ import annotations

from dataclasses import dataclass

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Facts:
    """Properties of a dataset. ``mean`` and ``std`` refer to pixels in [0, 1]."""

    title: str
    classes: int
    size: int
    layout: str  # expected files, for the error message
    mean: tuple[float, ...] | None = IMAGENET_MEAN  # None: measured on the training split
    std: tuple[float, ...] | None = IMAGENET_STD
    channels: int = 3
    padding: int = 0  # on each side, before the random crop; 0: one eighth of the side
    flip: bool = True
    fetched: bool = True  # whether torchvision can download it
    examples: int = 0  # outside the test set; 0 if the split is by class
    has_validation: bool = False  # whether there is an official validation split


DATASETS: dict[str, Facts] = {
    "digits": Facts(
        "scikit-learn's digits", 10, 8, "it is inside scikit-learn", None, None, 1, 1, flip=False, examples=1797
    ),
    "cifar10": Facts(
        "CIFAR-10", 10, 32, "cifar-10-batches-py/", (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), examples=50_000
    ),
    "cifar100": Facts(
        "CIFAR-100", 100, 32, "cifar-100-python/", (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762), examples=50_000
    ),
    "svhn": Facts(
        "SVHN",
        10,
        32,
        "train_32x32.mat, extra_32x32.mat and test_32x32.mat",
        (0.4309, 0.4302, 0.4463),
        (0.1965, 0.1984, 0.1992),
        flip=False,
        examples=73_257 + 531_131,
    ),
    "fashion-mnist": Facts(
        "Fashion-MNIST",
        10,
        28,
        "FashionMNIST/raw/ with the four idx files",
        (0.2860,),
        (0.3530,),
        1,
        4,
        examples=60_000,
    ),
    "caltech101": Facts("Caltech-101", 101, 64, "caltech101/101_ObjectCategories/"),
    "caltech256": Facts("Caltech-256", 256, 299, "caltech256/256_ObjectCategories/"),
    "flowers102": Facts(
        "Oxford Flowers-102",
        102,
        224,
        "flowers-102/ with jpg/, imagelabels.mat and setid.mat",
        examples=1020,
        has_validation=True,
    ),
    "cub2011": Facts(
        "CUB-200-2011",
        200,
        224,
        "CUB_200_2011/ with images/, images.txt and train_test_split.txt",
        fetched=False,
        examples=5_994,
    ),
    "imagenet": Facts(
        "ImageNet",
        1000,
        224,
        "train/ and val/ with one folder per class, and ILSVRC2012_devkit_t12.tar.gz or meta.bin",
        fetched=False,
        examples=1_281_167,
        has_validation=True,
    ),
}
