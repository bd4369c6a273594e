"""Changing the norm layers of a model, before training, to those that `advise` recommends."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from typing import Any, TypeVar

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from betternorm.advice.advise import Advice, advise
from betternorm.conversion.convert import GROUPS, convert
from betternorm.decay.norms import norm_layers
from betternorm.decay.report import NormReport
from betternorm.third_party import is_frozen

M = TypeVar("M", bound=nn.Module)

MOMENTUM, USUAL_BATCH = 0.1, 128  # torch's default, and the examples per batch that it suits

logger = logging.getLogger("betternorm")


def upgrade(
    model: M,
    batch_size: int,
    step_size: int | None = None,
    *,
    overfits: bool | None = None,
    iid: bool = True,
    ghost_size: int | None = None,
    num_groups: int | None = None,
    report: NormReport | None = None,
    verbose: bool = True,
) -> M:
    """Give a model, before training, the norm layers that :func:`advise` recommends; in place. Undo: ``revert(model)``.

    Where the paper's results and ours disagree, ours decide; see :func:`advise`.

    The moving averages get a window in examples: for batch sizes below 128, torch's momentum of 0.1 is replaced by a
    smaller one, so that they average over as many images as at 128. With two examples per batch it would be twenty
    images otherwise. The change is logged.

    What was done and what is left to do (parameter groups, tuning alpha) is printed.

    Args:
        model: any model with batch norm layers. Models that only have Group Norm are converted to batch group norm at
            batch sizes 2 and 3, and to "weighed" otherwise.
        batch_size, step_size, overfits, iid, report: as for :func:`advise`.
        ghost_size: instead of the recommended starting value.
        num_groups: instead of 32, or the largest number below that divides the channels of all layers.
        verbose: False prints nothing.

    Examples::

        >>> model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU())
        >>> upgrade(model, batch_size=128, verbose=False)[1]
        GhostBatchNorm(64, ghost_size=16, eps=1e-05, momentum=0.1, affine=True)
    """
    layers = norm_layers(model)
    if not layers:
        if any(is_frozen(module) for module in model.modules()):
            raise ValueError(
                f"the norm layers of {type(model).__name__} are frozen (FrozenBatchNorm2d), so training does not "
                "depend on them; convert(model, 'weighed') gives them an alpha, and a model built with "
                "norm_layer=nn.BatchNorm2d can be upgraded"
            )
        raise ValueError(f"{type(model).__name__} has no norm layers, so there is nothing to upgrade")
    advice = advise(batch_size, step_size, overfits=overfits, iid=iid, report=report)
    to, options = advice.to, dict(advice.options)
    has_batch_norm = any(isinstance(layer, _BatchNorm) for layer in layers.values())
    if not has_batch_norm and to in ("ghost", "group"):
        to, options = "weighed", {}
    if ghost_size is not None and ghost_size >= batch_size:
        message = f"ghost_size={ghost_size} is not below batch_size={batch_size}: ghost batch norm is then batch norm"
        warnings.warn(message, stacklevel=2)
    if to == "ghost" and ghost_size is not None:
        options["ghost_size"] = ghost_size
    if to in ("batch_group", "group"):
        chosen = num_groups or (_common_groups(layers) if has_batch_norm else None)
        options |= {"num_groups": chosen} if chosen else {}
    before = {name: type(layer).__name__ for name, layer in layers.items()}
    model = convert(model, to, **options)  # type: ignore[call-overload]
    after = norm_layers(model)
    momentum, changed = window_momentum(batch_size), 0
    for layer in after.values():
        if isinstance(layer, _BatchNorm) and layer.momentum == MOMENTUM != momentum:  # any other value was chosen
            layer.momentum = momentum
            changed += 1
    lines = _summary(before, {name: type(layer).__name__ for name, layer in after.items()}, options)
    if changed:
        lines.append(f"momentum of {changed} layers: {MOMENTUM} -> {momentum:.2g}, for {batch_size} examples per batch")
        logger.info(lines[-1])
    if verbose:
        print(_account(lines, advice))
    return model


def window_momentum(batch_size: int) -> float:
    """The momentum for which moving averages average over as many examples as torch's default does at 128 per batch.

    Examples::

        >>> [round(window_momentum(batch_size), 4) for batch_size in (256, 128, 16, 2)]
        [0.1, 0.1, 0.0131, 0.0016]
    """
    return MOMENTUM if batch_size >= USUAL_BATCH else 1 - (1 - MOMENTUM) ** (batch_size / USUAL_BATCH)


def _common_groups(layers: dict[str, nn.Module]) -> int | None:
    """The largest number of groups, up to Group Norm's own, that divides the channels of every batch norm.

    A layer with fewer channels than groups gets one channel per group and does not restrict the choice.
    """
    channels = {layer.num_features for layer in layers.values() if isinstance(layer, _BatchNorm)}
    return next(n for n in range(GROUPS, 0, -1) if all(c % n == 0 or c <= n for c in channels))


def _summary(before: dict[str, str], after: dict[str, str], options: dict[str, Any]) -> list[str]:
    changes = Counter((before[name], kind) for name, kind in after.items() if kind != before[name])
    details = ", ".join(f"{name}={value}" for name, value in options.items())
    return [f"{count} {was} -> {now}({details})" for (was, now), count in changes.items()]


def _account(lines: list[str], advice: Advice) -> str:
    done = [f"  {line}" for line in lines or ["nothing"]]
    return "\n".join([f"Upgraded for a batch size of {advice.batch_size} (undo: revert(model)):", *done, str(advice)])
