"""What the paper states, number by number, and which claim of which experiment judges it here.

A statement belongs to an experiment, and is judged by the verdict whose claim holds all of its words. Where nothing
here can judge it, the reason stands in its place.
"""

from __future__ import annotations

from dataclasses import dataclass

from betternorm_lab.experiments import ghost_size, small_batch

FEW = "CIFAR-100, 10,000 images"
ALL = "CIFAR-100, 40,000 images"
OTHER_DATA = "CIFAR-100 with 10,000 images for Caltech-256, a small residual network"
FLOWERS = "twenty classes of Flowers-102 at 32x32, 0.08 million parameters"
TWO_TOGETHER = f"{FEW}{small_batch.TOGETHER}"
ONE_BATCH = f"{FEW}, B"
ONE_RATE_AND_OWN = (("", f"{FEW}:", ""), (ghost_size.OWN_RATES, f"{FEW}{ghost_size.OWN_RATES}", "medium"))
STEPS = "; gradients of 128 examples per step"
ALONE, SHORT = ", one batch per step", "; 8 epochs, hardly learned"
FOUR_CLASSES = "10,000 images, batches of 16 in place of 128, 6,250 steps, hardly learned"
TWO_CLASSES = "ten classes of CIFAR-100 at 16x16, two of them per batch"
WEAK = f"{FLOWERS}; averages over ten batches, decay twenty times that of the weights, neither tuned"
NO_SVHN = "SVHN is not at hand"


@dataclass(frozen=True)
class Statement:
    """What the paper says, where, and in which number; and how it is judged here."""

    says: str
    place: str
    number: str
    experiment: str = ""
    words: tuple[str, ...] = ()
    differs: str = ""  # at medium scale, and where a statement was judged at one scale alone
    small: str = FLOWERS  # how the small scale differs
    untested: str = ""  # why nothing here can judge it
    setting: str = ""  # of several at medium scale, the one whose claims count
    scale: str = ""  # the only one at which it is judged here
    points: tuple[float, ...] = ()  # its number as differences in points of top-1, where it states them


STATEMENTS: dict[str, tuple[Statement, ...]] = {
    "Inference example weighing": (
        *(
            Statement(
                f"{says}, networks that others trained",
                "3.1",
                number,
                "alpha-imagenet",
                (f"every network: {words}",),
                small=f"five residual networks of CIFAR-100{differs}",
            )
            for says, number, words, differs in (
                ("alpha raises top-1", "up to +0.6 (ResNet-152, ImageNet)", "alpha raises top-1", ""),
                ("alpha raises top-5", "+0.16 (ResNet-152)", "alpha raises top-5", ""),
                (
                    "alpha lowers the cross-entropy",
                    "-4.7 % of it (ResNet-152)",
                    "alpha lowers the cross-entropy",
                    "; nats, of 1.14 to 1.30",
                ),
                (
                    "the same after a temperature, which the paper does not fit",
                    "",
                    "alpha lowers the cross-entropy after a temperature",
                    "; not in the paper",
                ),
            )
        ),
        Statement(
            "a small alpha gives most of the gain",
            "D",
            "",
            "alpha-imagenet",
            ("gives most of what alpha does to the cross-entropy",),
            small="at most 0.05, as we read it; five residual networks of CIFAR-100",
        ),
        Statement(
            "alpha raises the top-1 of a batch norm network, trained here",
            "3.1",
            "+0.6 (ResNet-152, ImageNet)",
            "alpha-ghost",
            ("alpha raises test top-1 with batch norm",),
            "CIFAR-100, trained here",
            points=(0.6,),
        ),
        Statement(
            "alpha raises its top-5",
            "3.1",
            "+0.16 (ResNet-152)",
            "alpha-ghost",
            ("alpha raises test top-5 with batch norm",),
            "CIFAR-100, trained here",
        ),
        Statement(
            "alpha lowers its cross-entropy",
            "3.1",
            "-4.7 % of it (ResNet-152)",
            "alpha-ghost",
            ("alpha lowers test cross-entropy with batch norm",),
            "CIFAR-100, trained here; nats",
        ),
        Statement(
            "the same after a temperature, which the paper does not fit",
            "",
            "",
            "alpha-ghost",
            ("alpha lowers it also after a temperature with batch norm",),
            "not in the paper",
        ),
        Statement(
            "the best alpha is largest for the network with the smallest batches",
            "3.1",
            "NASNet-A",
            "combined",
            ("best alpha for batch norm is larger",),
            "the same network at several batch sizes",
        ),
        Statement(
            "large alphas cost more and more",
            "D",
            "",
            "alpha-imagenet",
            ("with alpha = 1 the cross-entropy is worse",),
            small="alpha = 1; five residual networks of CIFAR-100",
        ),
        *(
            Statement(
                f"the best alpha is not 1/B, {named}", "3.1", "", "alpha-ghost", (f"not 1/B with {named}",), differs
            )
            for named, differs in (
                ("batch norm", "for cross-entropy, of 13 alphas; 1/B is 0.0078"),
                ("ghost size 2", "for cross-entropy, of 13 alphas; 1/B is 0.5"),
            )
        ),
        Statement(
            "alpha below 1 raises the top-1 of Group Norm networks",
            "3.1",
            "a gain (Caltech-256)",
            "alpha-groupnorm",
            ("raises the top-1 of a Group Norm network",),
            OTHER_DATA,
        ),
        Statement(
            "alpha below 1 lowers the cross-entropy of Group Norm networks",
            "3.1",
            "a gain (CIFAR-100, SVHN)",
            "alpha-groupnorm",
            ("lowers the cross-entropy of a Group Norm network",),
            "10,000 images",
        ),
        Statement(
            "a large range of alphas does as well for Group Norm as 1",
            "D",
            "",
            "alpha-groupnorm",
            ("with alpha 0.8 a Group Norm network does as well",),
            "down to 0.8, as we read it; validation data",
            "down to 0.8, as we read it; validation data",
        ),
        Statement(
            "far from 1 Group Norm loses",
            "D",
            "",
            "alpha-groupnorm",
            ("with alpha 0 a Group Norm network is worse",),
            "alpha = 0; validation data",
            "alpha = 0; validation data",
        ),
    ),
    "Ghost batch norm": (
        *(
            Statement(
                f"ghosts raise top-1 where networks overfit{named}",
                "3.2",
                "+5.8 (Caltech-256)",
                "ghost-size",
                ("improves on batch norm (test top-1)",),
                OTHER_DATA,
                setting=setting,
                scale=scale,
                points=(5.8,),
            )
            for named, setting, scale in ONE_RATE_AND_OWN
        ),
        Statement(
            "ghosts raise top-1 on CIFAR-100",
            "3.2",
            "+0.84",
            "ghost-size",
            ("improves on batch norm (test top-1)", ALL),
            "ghost size 16 alone; a smaller network, 10 epochs, in which it hardly overfits",
            points=(0.84,),
        ),
        Statement("ghosts do nothing on SVHN, where networks do not overfit", "3.2", "98.79 %", untested=NO_SVHN),
        Statement(
            "ghosts gain less where networks overfit less",
            "3.2",
            "+5.8, +0.84, 0",
            "ghost-size",
            ("gains more test top-1 with 10,000",),
            "the same data, more of it",
        ),
        *(
            Statement(
                f"the effect of the ghost size is unimodal{named}",
                "3.2",
                "Figure 3",
                "ghost-size",
                ("unimodal",),
                OTHER_DATA,
                setting=setting,
                scale=scale,
            )
            for named, setting, scale in ONE_RATE_AND_OWN
        ),
        Statement(
            "ghosts alone help as long as they are larger than 2",
            "4.2",
            "Figure 5a",
            "ghost-size",
            ("every ghost size above 2 improves",),
            OTHER_DATA,
            setting=f"{FEW}:",
        ),
        Statement(
            "ghosts regularise", "3.2", "", "ghost-size", ("ghosts regularise",), "training top-1, in evaluation mode"
        ),
        *(
            Statement(
                f"alpha gains more top-1 the smaller the ghosts{named}",
                "3.2",
                "Figure 4",
                "alpha-ghost",
                ("alpha gains more test top-1",),
                OTHER_DATA,
                setting=setting,
                scale=scale,
            )
            for named, setting, scale in ONE_RATE_AND_OWN
        ),
        Statement(
            "alpha adds to the gain by ghosts",
            "3.2",
            "Figure 4",
            "alpha-ghost",
            ("alpha adds to ghost size",),
            OTHER_DATA,
            setting=f"{FEW}:",
        ),
        Statement(
            "the best alphas for top-1 and for cross-entropy may differ",
            "3.2",
            "wildly on SVHN",
            "alpha-ghost",
            ("for top-1 and for cross-entropy differ with ghost size",),
            f"{OTHER_DATA}; ghost size 2",
            f"{FLOWERS}; ghost size 2",
        ),
        Statement(
            "the best alpha is larger for smaller ghosts",
            "D",
            "Figure 4",
            "alpha-ghost",
            ("the best alpha for top-1 is larger",),
            OTHER_DATA,
        ),
    ),
    "Weight decay on gamma and beta": (
        Statement(
            "decay on gamma and beta raises top-1 with paths",
            "3.3",
            "+0.3 (CIFAR-100, P = 0.002), +0.91 (Caltech-256, ResNet-50)",
            "decay",
            ("residual network: decay on gamma and beta raises",),
            OTHER_DATA,
            points=(0.3, 0.91),
        ),
        Statement(
            "the same, the strength of decay chosen on validation data",
            "3.3",
            "",
            "decay",
            ("residual network: decay of the best strength",),
            f"{OTHER_DATA}; four times that of the weights",
            scale="medium",
        ),
        Statement(
            "gamma toward 0 or toward 1 makes no difference",
            "3.3",
            "P = 0.46",
            "decay",
            ("toward 0 or toward 1",),
            "an equivalence test",
        ),
        Statement(
            "decay does not help without paths",
            "3.3",
            "-0.13 (Inception-v3)",
            "decay",
            ("without shortcuts: decay on gamma and beta does not raise",),
            "a plain network",
            points=(-0.13,),
        ),
        Statement("decay changes nothing on SVHN", "3.3", "98.79 %", untested=NO_SVHN),
    ),
    "Groups of channels and examples": (
        *(
            Statement(
                f"B = 2: batch group norm is better than Group Norm{words}",
                "3.4",
                "+0.69 (CIFAR-100), +5.0 (Caltech-256)",
                "small-batch",
                ("batch group norm is better than Group Norm",),
                f"{OTHER_DATA}, {length}",
                f"{FLOWERS}; averages over twenty images",
                setting=setting,
                points=(0.69, 5.0),
            )
            for words, setting, length in (
                (", gradients of 64 batches per step", TWO_TOGETHER, "40 epochs"),
                (ALONE, f"{FEW}:", "8 epochs, hardly learned"),
            )
        ),
        Statement("B = 2 on SVHN: it is not", "3.4", "-0.02", untested=NO_SVHN),
        Statement(
            "B = 2: batch group norm regularises",
            "3.4",
            "",
            "small-batch",
            ("batch group norm regularises",),
            "training less test top-1, gradients of 64 batches per step",
            setting=TWO_TOGETHER,
        ),
        Statement(
            "B = 2: decay on gamma and beta adds to it",
            "4.2",
            "some additional effect",
            "small-batch",
            ("adds to batch group norm",),
            f"{OTHER_DATA}, gradients of 64 batches per step",
            setting=TWO_TOGETHER,
        ),
    ),
    "All four, across batch sizes": (
        Statement(
            "B = 128: all four are better than ghosts alone",
            "4.2",
            "Figure 5a",
            "combined",
            ("all four improve on ghosts of",),
            OTHER_DATA,
            f"{WEAK}; B = 32",
        ),
        Statement(
            "Group Norm is generally slightly worse than batch norm",
            "C",
            "",
            "combined",
            ("batch norm is better than Group Norm",),
            OTHER_DATA,
            f"{FLOWERS}, B = 32",
        ),
        *(
            Statement(
                f"B = {size}: all four are better than {other}{alone}",
                "4.2",
                number,
                "combined",
                (f"B = {size}: all four improve on {words}",),
                f"{OTHER_DATA}{differs}",
                WEAK,
                setting=setting,
                points=points,
            )
            for size, other, words, number, points, setting, alone, differs in (
                (128, "batch norm", "idealised batch norm", "Figure 5a", (), ONE_BATCH, "", ""),
                (128, "Group Norm", "Group Norm", "Figure 5a", (), ONE_BATCH, "", ""),
                (16, "Group Norm", "Group Norm", "Figure 5a", (), ONE_BATCH, "", "; 20 epochs"),
                (4, "batch norm", "idealised batch norm", "Figure 5a", (), TWO_TOGETHER, "", STEPS),
                (4, "Group Norm", "Group Norm", "Figure 5a", (), TWO_TOGETHER, "", STEPS),
                (2, "batch norm", "idealised batch norm", "+6.5 (Caltech-256)", (6.5,), TWO_TOGETHER, "", STEPS),
                (2, "Group Norm", "Group Norm", "+5.9 (Caltech-256)", (5.9,), TWO_TOGETHER, "", STEPS),
                (2, "Group Norm", "Group Norm", "+5.9 (Caltech-256)", (5.9,), ONE_BATCH, ALONE, SHORT),
                (1, "Group Norm", "Group Norm", "Figure 5a, by decay alone", (), TWO_TOGETHER, "", STEPS),
            )
        ),
    ),
    "Fine-tuning": (
        *(
            Statement(
                f"fine-tuning: all four are better than {other}",
                "4.3",
                number,
                "transfer",
                ("Flowers", f"B = 32: all four improve on {words}"),
                small="twenty classes of Flowers-102 at 32x32, from CIFAR-100",
                points=points,
            )
            for other, words, number, points in (
                ("batch norm", "idealised batch norm", "+2.4 (Flowers-102), +1.4 (CUB-2011)", (2.4, 1.4)),
                ("Group Norm", "Group Norm", "+6.1 (Flowers-102), +3.8 (CUB-2011)", (6.1, 3.8)),
            )
        ),
        *(
            Statement(
                f"fine-tuning: Group Norm gains by a Group Norm checkpoint{named}",
                "4.3",
                "roughly 5",
                "transfer",
                (data, "B = 32: Group Norm gains by a checkpoint"),
                small=f"twenty classes of {data}-{number} at 32x32, from CIFAR-100",
                points=(5.0,),
            )
            for data, number, named in (("Flowers", 102, ""), ("Caltech", 101, ", Caltech-101"))
        ),
    ),
    "Batches of few classes": (
        *(
            Statement(
                f"{classes}: {says}",
                "4.4",
                number,
                "non-iid",
                (words,),
                FOUR_CLASSES,
                TWO_CLASSES,
                points=points,
                scale=scale,
            )
            for classes, scale in (("two classes of ten", "small"), ("four of a hundred", "medium"))
            for says, number, points, words in (
                (
                    "alpha helps batch norm",
                    "40.1 to 62.2 %",
                    (22.1,),
                    "alpha raises the top-1 of batch norm",
                ),
                (
                    "ghosts help batch norm, alpha off",
                    "40.1 to 70.4 %",
                    (30.3,),
                    "the best ghost size, alpha off, improves on batch norm",
                ),
                (
                    "ghosts are as good as batch renorm or better, alpha off",
                    "70.4 against 69.0 %",
                    (1.4,),
                    "the best ghost size, alpha off, improves on batch renorm",
                ),
                (
                    "ghosts and alpha are better than batch norm and alpha",
                    "62.2 to 72.2 %",
                    (10.0,),
                    "the best ghost size, alpha on, improves on batch norm with alpha",
                ),
                (
                    "batch renorm is better than batch norm, alpha off",
                    "40.1 to 69.0 %",
                    (28.9,),
                    "batch renorm improves on batch norm, alpha off",
                ),
                (
                    "batch group norm is better than batch norm, alpha on for both",
                    "62.2 to 76.1 %",
                    (13.9,),
                    "batch group norm improves on batch norm, alpha on for both",
                ),
                (
                    "batch group norm is the best",
                    "76.1 against 72.2 %",
                    (3.9,),
                    "batch group norm improves on the best ghost size",
                ),
                (
                    "batch group norm hardly suffers",
                    "76.1 against 76.2 %",
                    (-0.1,),
                    "batch group norm does as well as with random batches",
                ),
                ("alpha does nothing for batch renorm", "0.1 at most", (0.1,), "alpha does nothing for batch renorm"),
                (
                    "the best of these halves the error of batch norm",
                    "59.9 to 23.9 %",
                    (),
                    "the best of all halves the error of batch norm",
                ),
            )
            if scale == "medium" or "suffers" not in says  # random batches are an arm at medium scale alone
        ),
    ),
    "Appendices A to C": (
        Statement(
            "the bound of the output in training is tight",
            "A",
            "sqrt(B - 1)",
            "output-range",
            ("reach 0.999 of the bound",),
            small="the layer alone",
        ),
        Statement(
            "with small groups a network comes near to it",
            "B",
            "-5.30 of -5.57",
            "output-range",
            ("comes nearer to the bound",),
        ),
        Statement(
            "at inference values fall outside",
            "B",
            "",
            "output-range",
            ("passes the bound",),
        ),
        Statement(
            "at inference the range shows no clear pattern as groups grow",
            "B",
            "",
            untested="the statement has no number; the ranges are on the page of the output range",
        ),
        Statement(
            "averages without augmentation cost top-1",
            "C",
            "-0.5",
            "negative",
            ("averages without augmentation lower test top-1",),
            small=f"{FLOWERS}; means over the training set, not a training with learning rate 0",
            points=(-0.5,),
        ),
        Statement(
            "averages without augmentation lower the cross-entropy mildly",
            "C",
            "",
            "negative",
            ("averages without augmentation lower test cross-entropy",),
        ),
        Statement(
            "averages over the test set do as well",
            "C",
            "within 0.1",
            "negative",
            ("averages over the test set give the same top-1",),
            small=f"{FLOWERS}; within 0.5",
        ),
        Statement(
            "they change the cross-entropy little",
            "C",
            "within 1 %",
            "negative",
            ("averages over the test set change the cross-entropy",),
            small=f"{FLOWERS}; per cent",
        ),
        *(
            Statement(f"{says} not help Group Norm", "C", "", "negative", (f"points with: {words}",))
            for says, words in (
                ("noise does", "noise"),
                ("random groups do", "random groups"),
                ("random groups half the time do", "random groups, half the time"),
                ("more and more groups do", "more and more groups"),
                ("fewer and fewer groups do", "fewer and fewer groups"),
            )
        ),
        Statement(
            "a constant number of values per group has mild success, which does not generalise",
            "C",
            "",
            untested="it would take several datasets; on one it is underpowered, see the page of appendix C",
        ),
        Statement(
            "learned group sizes overfit",
            "C",
            "",
            "baselines",
            ("in place of learned group sizes",),
            small=f"{FLOWERS}; plain Switchable Norm stands in for them",
        ),
    ),
}
