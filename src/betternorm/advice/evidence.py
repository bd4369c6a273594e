"""What `advise` rests on: the numbers of the paper, and those that this project measured where the two can be compared.

The measured ones are differences of test top-1 on CIFAR-100 with 10,000 training images, three runs each, each model at
the alpha that is best on validation data. Their rows are in docs/results; a test computes every number from them again.
"""

from __future__ import annotations

from dataclasses import dataclass

PAPER = {
    "weighing": "up to 0.6 points top-1 for ResNet-152 on ImageNet, without retraining; more with small ghost sizes",
    "weighing group": "small gains on CIFAR-100, SVHN, and Caltech-256 for models trained with Group Norm",
    "ghost": "+5.8 points on Caltech-256 and +0.84 on CIFAR-100; no gain on SVHN, where models overfit little",
    "decay": (
        "+0.3 points on CIFAR-100 (10 runs, P = 0.002); on Caltech-256 +0.91 for ResNet-50 and -0.13 for Inception-v3 "
        "(3 runs), where only the last block has a path to the output; no change on SVHN"
    ),
    "batch_group": (
        "at B = 2, over a tuned Group Norm, 73.91 to 74.60 % on CIFAR-100 (3 runs) and 48.2 to 53.2 % on Caltech-256 "
        "(2 runs); 98.75 to 98.73 % on SVHN"
    ),
    "not iid": "CIFAR-100, four classes per batch: 40.1 % for Batch Norm, 72.2 % with ghost size 16, 76.1 % with this",
    "batch size 1": "at B = 1 the gains over Group Norm come from decay on gamma and beta",
    "frozen": "not in the paper; common in object detection",
}


@dataclass(frozen=True)
class Measured:
    """How much better the paper's recommendation was here, in points of test top-1, with a 95 % interval.

    Attributes:
        what: the two things compared.
        setting: examples per batch and per optimizer step.
        rows: the keys of the runs with the recommendation, and of those that they are compared with.
        paired: whether they are the same runs, with alpha and without.
    """

    what: str
    setting: str
    difference: float
    low: float
    high: float
    rows: tuple[tuple[str, ...], tuple[str, ...]]
    paired: bool = False

    @property
    def outcome(self) -> str:
        """Whether this agrees with the paper."""
        return "agrees" if self.low > 0 else "disagrees" if self.high < 0 else "inconclusive"

    def __str__(self) -> str:
        interval = f"{self.difference:+.2f} [{self.low:.2f}, {self.high:.2f}]"
        return f"{self.what}, {self.setting}: {interval}, {self.outcome}"


_BATCH_NORM = ("939a985d8d1ade4b", "33506c5021a17a71", "4fac48b5c3a5a361")  # 128 per batch and step
_GHOST_8 = ("b5ea19589ae8e324", "229ec9f28bd6cea6", "bb8b8ec6f2dcf137")
_GHOST_8_OWN_RATE = ("1e4893395fc86a8f", "83a5d484ae2d33d9", "a2d543c79540e382")
_ALL_FOUR = ("c0a7f06f063132ea", "5c61f7e09592bd2b", "6038e96c8f86e9df")
_FOUR_OF_128 = ("2fbda1095061f659", "e6b8a980e16c615f", "2f26515482a0313f")
_FOUR_OF_128_ALL = ("5f03024b8a27657e", "a5a54c3186882bb0", "793b4f55ed0a65e0")
_16_BATCH_NORM = ("4e3ca62a1e55cea4", "57b58863a75824b0", "7571e206da62826c")
_16_ALL_FOUR = ("070a5000cc147222", "654c5dd7a407db99", "c4010c3f772819d4")
_TWO_BATCH_NORM = ("f434d85838876dc2", "cb2673a0ca3913bb", "03f10602bb6ea0c1")
_TWO_GROUP = ("d999a6a4813e0a9c", "c9a2edaf1e90660f", "f7bf4205a8be5352")
_TWO_GROUP_DECAY = ("5d74fde941cf5f74", "69c4c90087e0e36f", "6f98146d7b90fd10")
_TWO_BATCH_GROUP = ("116a05a08ec1a30f", "9e60f25ecb46a7dd", "64e0e46ac96df964")
_TWO_BATCH_GROUP_DECAY = ("c921782e503f891c", "58acf3b9db305133", "0515cd6bfc4a938a")
_TWO_OF_128_BATCH_NORM = ("e65260e6064c7cde", "2189a0aee6dde5cc", "578660a01ec513e7")
_TWO_OF_128_BATCH_NORM_DECAY = ("b8574fb1decf2030", "22c553b38efd43b5", "d06472ad0afd423d")
_TWO_OF_128_BATCH_GROUP = ("7a27ae4dad150b73", "0b6bf2074f50347c", "ccd45bf1e4a5c4a0")
_TWO_OF_128_BATCH_GROUP_DECAY = ("aab4cb729fd2a88b", "a81a3e45461fb6c0", "08bf21c413083567")
_GROUP = ("51a048750d899161", "4632f83ce9a55a72", "3642ea6d14afbbfa")
_NOT_IID_BATCH_NORM = ("81c3deb559b29711", "a3b5c1f8aeac59df", "cb88da882705be2e")
_NOT_IID_BATCH_GROUP = ("dab44133f49250e5", "188d2e29c0fe758d", "7dc058ac80ad2f8c")

_TOGETHER, _TWO, _TWO_OF_128 = "128 per batch", "2 per batch and step", "2 per batch, 128 per step"

MEASURED = {
    "ghost": Measured(
        "ghost size 8 and batch norm", _TOGETHER, 4.47, 2.62, 6.32, (_GHOST_8_OWN_RATE, _BATCH_NORM)
    ),
    "ghost, accumulated": Measured(
        "batches of 4 and of 128", "128 per step", 1.99, -0.22, 4.20, (_FOUR_OF_128, _BATCH_NORM)
    ),
    "ghost, 16": Measured(
        "ghost size 8 with decay, and batch norm", "16 per batch", -1.26, -2.60, 0.08, (_16_ALL_FOUR, _16_BATCH_NORM)
    ),
    "batch_group": Measured(
        "batch group norm and batch norm", _TWO, 1.27, 0.11, 2.44, (_TWO_BATCH_GROUP, _TWO_BATCH_NORM)
    ),
    "batch_group, group": Measured(
        "batch group norm and Group Norm", _TWO, -0.69, -2.11, 0.73, (_TWO_BATCH_GROUP, _TWO_GROUP)
    ),
    "batch_group, accumulated": Measured(
        "batch group norm and batch norm", _TWO_OF_128, -7.25, -7.82, -6.68,
        (_TWO_OF_128_BATCH_GROUP, _TWO_OF_128_BATCH_NORM),
    ),
    "not iid": Measured(
        "batch group norm and batch norm", "16 per batch of four classes", -6.80, -9.75, -3.85,
        (_NOT_IID_BATCH_GROUP, _NOT_IID_BATCH_NORM),
    ),
    "weighing": Measured(
        "batch norm with alpha and without", _TOGETHER, 0.03, -0.27, 0.34, (_BATCH_NORM, _BATCH_NORM), paired=True
    ),
    "weighing, accumulated": Measured(
        "batch norm with alpha and without", _TWO_OF_128, 3.95, 2.67, 5.23,
        (_TWO_OF_128_BATCH_NORM, _TWO_OF_128_BATCH_NORM), paired=True,
    ),
    "weighing, two": Measured(
        "batch group norm with alpha and without", _TWO, 2.55, 1.79, 3.31, (_TWO_BATCH_GROUP, _TWO_BATCH_GROUP),
        paired=True,
    ),
    "weighing group": Measured(
        "Group Norm with alpha and without", "128 per step", 0.45, -0.26, 1.16, (_GROUP, _GROUP), paired=True
    ),
    "decay": Measured(
        "ghost size 8 with decay and without", _TOGETHER, -0.55, -1.84, 0.74, (_ALL_FOUR, _GHOST_8)
    ),
    "decay, four": Measured(
        "batch norm with decay and without", "4 per batch, 128 per step", -0.75, -2.40, 0.90,
        (_FOUR_OF_128_ALL, _FOUR_OF_128),
    ),
    "decay, two": Measured(
        "batch group norm with decay and without", _TWO, -0.63, -1.76, 0.51, (_TWO_BATCH_GROUP_DECAY, _TWO_BATCH_GROUP)
    ),
    "decay, two accumulated": Measured(
        "batch norm with decay and without", _TWO_OF_128, -1.57, -2.38, -0.77,
        (_TWO_OF_128_BATCH_NORM_DECAY, _TWO_OF_128_BATCH_NORM),
    ),
    "decay, two accumulated, batch_group": Measured(
        "batch group norm with decay and without", _TWO_OF_128, -0.69, -1.27, -0.10,
        (_TWO_OF_128_BATCH_GROUP_DECAY, _TWO_OF_128_BATCH_GROUP),
    ),
    "decay, group": Measured(
        "Group Norm with decay and without", _TWO, -0.75, -2.26, 0.77, (_TWO_GROUP_DECAY, _TWO_GROUP)
    ),
}  # fmt: skip
