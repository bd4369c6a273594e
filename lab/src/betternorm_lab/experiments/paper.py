"""The statements of the paper, and the claim of which experiment tests each of them.

A statement has one verdict: that of the claim with its id, at the first scale of :data:`SCALES` that has been run.
Where nothing here tests a statement, the reason is given instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

SCALES = ("medium", "small")
MEDIUM_DATA = "CIFAR-100, 10,000 images"
FLOWERS = "Flowers-102, 20 classes"
PRETRAINED = "five CIFAR-100 ResNets"
NOT_TUNED = f"{FLOWERS}; not tuned on validation data"
FEW_CLASSES = "ten classes of CIFAR-100, two per batch; settings changed after test results had been seen"


@dataclass(frozen=True)
class Statement:
    """A statement of the paper and how it is tested.

    Args:
        id: never shown, and never changed.
        says, place, number: what the paper says, where, and its number.
        experiment: the experiment that tests it.
        claims: the id of the claim at each scale.
        differs: how our test differs from the paper's, at each scale.
        points: the paper's number as differences in points of top-1.
        untested: why it is not tested.
    """

    id: str
    says: str
    place: str
    number: str = ""
    experiment: str = ""
    claims: Mapping[str, str] = field(default_factory=dict)
    differs: Mapping[str, str] = field(default_factory=dict)
    points: tuple[float, ...] = ()
    untested: str = ""


def _small(claim: str) -> dict[str, str]:
    return {"small": claim}


def _both(claim: str, setting: str = "", small: str = "flowers102-20") -> dict[str, str]:
    """The same claim at both scales, at medium scale in one of its settings."""
    return {"medium": "/".join(part for part in ("cifar100-10k", setting, claim) if part), "small": f"{small}/{claim}"}


DIFFERS = {"medium": MEDIUM_DATA, "small": FLOWERS}

STATEMENTS: dict[str, tuple[Statement, ...]] = {
    "Inference example weighing": (
        Statement(
            "pretrained-top1",
            "alpha raises the top-1 of pretrained batch norm models",
            "3.1",
            "up to +0.6 (ResNet-152, ImageNet)",
            "alpha-pretrained",
            _small("all/top1"),
            _small(PRETRAINED),
        ),
        Statement(
            "pretrained-cross-entropy",
            "alpha lowers the cross-entropy of pretrained batch norm models",
            "3.1",
            "-4.7 % (ResNet-152, ImageNet)",
            "alpha-pretrained",
            _small("all/cross_entropy"),
            _small(f"{PRETRAINED}; nats, of 1.14 to 1.30"),
        ),
        Statement(
            "alpha-by-batch",
            "the best alpha is larger for models trained with smaller batches",
            "3.1",
            "NASNet-A",
            "combined",
            _small("flowers102-20/alpha-by-batch"),
            _small(f"{FLOWERS}; batches of 2 and 32"),
        ),
        Statement(
            "group-norm-top1",
            "alpha below 1 raises the top-1 of Group Norm models",
            "3.1",
            "a gain (Caltech-256)",
            "alpha-groupnorm",
            _both("top1"),
            DIFFERS,
        ),
        Statement(
            "group-norm-cross-entropy",
            "alpha below 1 lowers the cross-entropy of Group Norm models",
            "3.1",
            "a gain (CIFAR-100, SVHN)",
            "alpha-groupnorm",
            _both("cross_entropy"),
            {"medium": f"{MEDIUM_DATA}; nats", "small": FLOWERS},
        ),
    ),
    "Ghost batch norm": (
        Statement(
            "ghosts-overfitting",
            "ghosts raise top-1 where models overfit",
            "3.2",
            "+5.8 (Caltech-256)",
            "ghost-size",
            _both("ghosts-help", "own-rates"),
            {"medium": f"{MEDIUM_DATA}; each ghost size at its own learning rate", "small": FLOWERS},
            (5.8,),
        ),
        Statement(
            "ghosts-cifar100",
            "ghosts raise top-1 on CIFAR-100",
            "3.2",
            "+0.84",
            "ghost-size",
            {"medium": "cifar100-40k/ghosts-help"},
            {"medium": "ghost size 16; a smaller network, 10 epochs, little overfitting"},
            (0.84,),
        ),
        Statement(
            "unimodal",
            "the effect of the ghost size is unimodal",
            "3.2",
            "Figure 3",
            "ghost-size",
            _both("unimodal", "own-rates"),
            {"medium": f"{MEDIUM_DATA}; sizes 128, 8 and 2, each at its own learning rate", "small": FLOWERS},
        ),
        Statement(
            "alpha-with-ghosts",
            "alpha gains more top-1 with smaller ghosts",
            "3.2",
            "Figure 4",
            "alpha-ghost",
            _both("gain-by-size/top1", "own-rates"),
            {"medium": f"{MEDIUM_DATA}; ghost size 2 against batch norm", "small": FLOWERS},
        ),
        Statement(
            "alpha-adds",
            "alpha adds to the gain from ghosts",
            "3.2",
            "Figure 4",
            "alpha-ghost",
            _both("best-ghosts/top1"),
            DIFFERS,
        ),
        Statement(
            "svhn",
            "on SVHN, where models do not overfit, ghosts, decay and batch group norm change nothing",
            "3.2 to 3.4",
            "98.79 %",
            untested="no runs on SVHN",
        ),
    ),
    "Weight decay on gamma and beta": (
        Statement(
            "decay",
            "decay on gamma and beta raises top-1 in networks with shortcuts",
            "3.3",
            "+0.3 (CIFAR-100, P = 0.002), +0.91 (Caltech-256, ResNet-50)",
            "decay",
            {"medium": "residual network/decay", "small": "pre-activation network/decay"},
            {"medium": f"{MEDIUM_DATA}; as strong as on the weights", "small": NOT_TUNED},
            (0.3, 0.91),
        ),
        Statement(
            "decay-target",
            "decay of gamma toward 0 or toward 1 makes no difference",
            "3.3",
            "P = 0.46",
            "decay",
            {"medium": "residual network/toward", "small": "pre-activation network/toward"},
            {"medium": f"{MEDIUM_DATA}; an equivalence test", "small": NOT_TUNED},
        ),
        Statement(
            "decay-without-paths",
            "decay does not help without shortcuts",
            "3.3",
            "-0.13 (Inception-v3)",
            "decay",
            {"medium": "without shortcuts/decay"},
            {"medium": "a plain network"},
            (-0.13,),
        ),
    ),
    "Batch group norm": (
        Statement(
            "batch-group",
            "batch group norm is better than Group Norm with 2 examples",
            "3.4",
            "+0.69 (CIFAR-100), +5.0 (Caltech-256)",
            "small-batch",
            _both("over-group", "steps-of-128"),
            {"medium": f"{MEDIUM_DATA}; 128 examples per step, normalized in pairs", "small": FLOWERS},
            (0.69, 5.0),
        ),
    ),
    "All four techniques": (
        Statement(
            "all-four-128",
            "all four are better than batch norm, B = 128",
            "4.2",
            "Figure 5a",
            "combined",
            {"medium": "cifar100-10k/128/over-batch"},
            DIFFERS,
        ),
        Statement(
            "all-four-ghosts",
            "all four are better than ghosts alone, B = 128",
            "4.2",
            "Figure 5a",
            "combined",
            {"medium": "cifar100-10k/128/over-ghosts", "small": "flowers102-20/32/over-ghosts"},
            {"medium": MEDIUM_DATA, "small": f"{NOT_TUNED}; B = 32"},
        ),
        *(
            Statement(
                f"all-four-2-{key}",
                f"all four are better than {other}, B = 2",
                "4.2",
                f"{points:+g} (Caltech-256)",
                "combined",
                _both(f"2/over-{key}", "steps-of-128"),
                {"medium": f"{MEDIUM_DATA}; 128 examples per step", "small": NOT_TUNED},
                (points,),
            )
            for key, other, points in (("batch", "batch norm with B = 128", 6.5), ("group", "Group Norm", 5.9))
        ),
        *(
            Statement(
                f"fine-tuning-{key}",
                f"fine-tuning: all four are better than {other}",
                "4.3",
                number,
                "transfer",
                _small(f"flowers102-20/32/over-{key}"),
                _small(f"{FLOWERS}, from CIFAR-100; settings changed after test results had been seen"),
                points,
            )
            for key, other, number, points in (
                ("batch", "batch norm", "+2.4 (Flowers-102), +1.4 (CUB-2011)", (2.4, 1.4)),
                ("group", "Group Norm", "+6.1 (Flowers-102), +3.8 (CUB-2011)", (6.1, 3.8)),
            )
        ),
    ),
    "Batches of few classes": (
        Statement(
            "few-classes-alpha",
            "alpha helps batch norm",
            "4.4",
            "40.1 to 62.2 %",
            "non-iid",
            {"small": "cifar100-10/alpha/batch"},
            {"small": FEW_CLASSES},
            (22.1,),
        ),
        Statement(
            "few-classes-batch-group",
            "batch group norm is better than ghosts, alpha on",
            "4.4",
            "72.2 to 76.1 %",
            "non-iid",
            {"small": "cifar100-10/on/group-ghosts"},
            {"small": FEW_CLASSES},
            (3.9,),
        ),
    ),
    "Appendix C": (
        Statement(
            "averages-augmentation",
            "moving averages without augmentation cost top-1",
            "C",
            "-0.5",
            "negative",
            _small("plain/top1"),
            _small(f"{FLOWERS}; means over the training set, not training with learning rate 0"),
            (-0.5,),
        ),
        Statement(
            "random-groups",
            "random channel groups do not help Group Norm",
            "C",
            "",
            "negative",
            _small("group/random groups"),
            _small(FLOWERS),
        ),
    ),
}
