"""The datasets, models and hyperparameters of all experiments at each scale, in one place.

*smoke* is scikit-learn's digits, a second or two per trial. *small* is photographs on a CPU, seconds to two minutes per
trial: mostly the first twenty classes of Oxford Flowers-102 at 32x32, whose ten images per class a model overfits, as
regularization requires. *medium* is CIFAR-100 with the paper's validation and test sets, minutes of one core per trial:
10,000 training images, which a model overfits as it does the paper's Caltech-256, and all 40,000 as the control.
*paper* is section 4.1; the paper gives no learning rates or numbers of epochs, and ours are common for its models.
"""

from __future__ import annotations

from dataclasses import replace

from betternorm_lab.data import DATASETS, training_images
from betternorm_lab.experiments import protocol
from betternorm_lab.training import Config

SCALES = {  # the description on the pages
    "smoke": "Smoke scale: a second or two of training on scikit-learn's digits. It only shows that everything runs.",
    "small": "Small scale: small images, small residual networks and short training on a CPU. It shows the direction "
    "of an effect, not its size on the paper's data; the settings are at the end of the page. Some were changed after "
    "test results had been seen, moving averages have a window of ten batches at every batch size, and decay on "
    "gamma and beta is twenty times as strong as on the weights: see `docs/results/protocol.md`.",
    "medium": "Medium scale: CIFAR-100 at 32x32, with the paper's validation and test sets of 10,000 images each, and "
    "a post-activation residual network of 0.7 million parameters. Hyperparameters were chosen on validation data and "
    "committed before the test set was read: see `docs/results/protocol.md`.",
    "paper": "Paper scale: the paper's data, models and batch sizes. It gives no learning rates or numbers of epochs.",
}
SEEDS = {"smoke": 2, "small": 5, "medium": 3, "paper": 3}  # per arm, unless an experiment has its own number

# Margins of equivalence: points of top-1, and nats. Those of the small scale were set after it had been run.
MARGINS = {
    "smoke": {"top1": 1.0, "cross_entropy": 0.05},
    "small": {"top1": 1.0, "cross_entropy": 0.05},
    "medium": protocol.MARGINS,
    "paper": {"top1": 0.3, "cross_entropy": 0.01},
}

# Denser near 0, where the best alpha of a Batch Norm model lies, and near 1, where that of a Group Norm model does.
ALPHAS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 1.0)

SMOKE = Config(
    dataset="digits",
    train_examples=256,
    width=8,
    blocks=(1, 1),
    batch_size=32,
    epochs=6,
    validate_every=0,
    alpha_grid=(0.0, 0.05, 0.2, 0.5, 1.0),
)
SMALL = Config(
    dataset="flowers102",
    classes=20,
    image_size=32,
    width=16,
    blocks=(1, 1, 1),
    stem_stride=2,
    batch_size=32,
    learning_rate=0.08,
    epochs=60,
    validate_every=0,
    alpha_grid=ALPHAS,
)
FLOWERS102 = replace(SMALL, classes=None, width=32, batch_size=128, learning_rate=0.1)
CALTECH101 = replace(SMALL, dataset="caltech101", epochs=30)
FEW = Config(
    dataset="cifar100",
    train_examples=10_000,
    network="post_resnet",
    width=32,
    blocks=(2, 2, 2),
    stem_stride=2,
    averages_over=1215,  # torch's momentum of 0.1 at 128 examples per batch, and the same window at every batch size
    batch_size=128,
    learning_rate=0.1,
    epochs=40,
    precision="bf16-mixed",
    validate_every=0,
    alpha_grid=(0.0, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.8, 0.9, 0.95, 1.0),
)
ALL = replace(FEW, train_examples=None, epochs=10)  # the same number of steps on four times as many images
PAPER = Config(dataset="cifar100", epochs=160, schedule="step", validate_every=10, alpha_grid=ALPHAS)
CALTECH256 = replace(
    PAPER,
    dataset="caltech256",
    network="inception_v3",
    image_size=299,
    epochs=100,
    batch_size=32,
    learning_rate=0.05,
    precision="16-mixed",
)

# Channel groups of Group Norm and batch group norm. They must divide the channels of every layer; the largest common
# divisor is 16 for Inception-v3 and 64 for the others.
GROUPS = {"smoke": 4, "small": 8, "medium": 8, "paper": 32}
MOST_GROUPS = {"inception_v3": 16}

# What most experiments train, by dataset.
TASKS: dict[str, dict[str, Config]] = {
    "smoke": {"digits": SMOKE},
    "small": {"flowers102-20": SMALL},
    "medium": {"cifar100-10k": FEW},
    "paper": {"cifar100": PAPER, "svhn": replace(PAPER, dataset="svhn", epochs=20), "caltech256": CALTECH256},
}


def steps(config: Config) -> int:
    """The number of training steps; approximate if only some classes are kept."""
    dataset = config.dataset.removeprefix("stand-in:")
    images = config.train_examples or training_images(dataset)
    if config.classes is not None:
        images = images * config.classes // DATASETS[dataset].classes
    each = images // config.batch_size
    return config.epochs * min(each, config.steps_per_epoch or each)


def with_renorm(config: Config) -> Config:
    """Batch renorm: plain batch norm for a tenth of training, then limits that widen over the next four tenths."""
    total = steps(config)
    return with_norm(config, "renorm", warmup_steps=total // 10, d_steps=3 * total // 10, r_steps=total // 2)


def groups(config: Config, scale: str) -> int:
    return min(GROUPS[scale], MOST_GROUPS.get(config.network, GROUPS[scale]))


def with_norm(config: Config, norm: str, **options: object) -> Config:
    return replace(config, norm=norm, norm_options=options)


def at_batch_size(config: Config, batch_size: int) -> Config:
    """The same epochs at another batch size, with the learning rate proportional to it.

    The sum of the learning rate over all steps stays the same, and so does the total effect of weight decay.
    """
    rate = config.learning_rate * batch_size / config.batch_size
    return replace(config, batch_size=batch_size, learning_rate=float(f"{rate:.3g}"))
