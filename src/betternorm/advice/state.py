"""The state of the norm layers as `betternorm.diagnose` reads it: modes, what is frozen, ranks. Nothing is run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from betternorm.advice.findings import Finding
from betternorm.decay.norms import gammas_and_betas
from betternorm.third_party import is_frozen

SKEW = 0.1  # mean distance between ranks, in standard deviations, beyond what the last update explains
LAG = 0.1  # of the training steps: averages that reach back further lag behind the weights

_ALL = "for layer in model.modules() if isinstance(layer, torch.nn.modules.batchnorm._BatchNorm)"
FREEZE = f"[layer.eval() {_ALL}]  # after model.train(): freezes the statistics of all"


def mode_findings(model: nn.Module, layers: Mapping[str, nn.Module], batch_size: int) -> list[Finding]:
    """Train mode left on, and statistics that are frozen in some layers or apart from gamma and beta."""
    updating = tuple(name for name, layer in layers.items() if _is_updating(layer))
    by_batch = tuple(name for name, layer in layers.items() if getattr(layer, "running_mean", None) is None)
    affine = {name: _trainable(layer) for name, layer in layers.items() if any(gammas_and_betas(layer))}
    frozen = tuple(name for name, trainable in affine.items() if not all(trainable))
    findings = []
    if model.training and len({_is_updating(layer) for layer in layers.values()}) == 2:
        fixed = tuple(name for name in layers if name not in updating)
        why = f"statistics are frozen in {len(fixed)} of {len(layers)} norm layers and updated in the others"
        findings.append(Finding("partly_frozen", why, fixed, FREEZE))
    elif updating:
        why = f"{_of(updating, layers)} in train mode: outputs depend on the other examples of the batch"
        findings.append(Finding("train_mode", f"{why} (here {batch_size})", updating, "model.eval()"))
    if by_batch:
        why = f"{_of(by_batch, layers)} without moving averages (track_running_stats=False): outputs depend on batches"
        fix = "betternorm.calibrate(model, stats_loader)  # after building the model with track_running_stats=True"
        findings.append(Finding("train_mode", why, by_batch, fix))
    some_train = any(parameter.requires_grad for parameter in model.parameters())
    if frozen and some_train and not any(f.cause == "partly_frozen" for f in findings):
        if set(frozen) != set(affine) or any(any(affine[name]) for name in frozen):
            why = f"gamma or beta is frozen (requires_grad=False) in {len(frozen)} of {len(affine)} norm layers"
        elif updating:
            why = "gamma and beta are frozen (requires_grad=False), but statistics are updated in train mode"
        else:
            return findings  # frozen in every layer: what was meant
        fix = f"[layer.requires_grad_(True) {_ALL}]  # trains gamma and beta of all"
        findings.append(Finding("partly_frozen", why, frozen, fix))
    return findings


def uneven_updates(layers: Mapping[str, nn.Module], calls: Mapping[str, float]) -> tuple[str, ...]:
    """Layers whose averages were updated less often than others, in proportion to their calls in a forward pass."""
    steps = {name: updates(layer) for name, layer in layers.items()}
    per_call = {name: count / calls[name] for name, count in steps.items() if count is not None and calls.get(name)}
    most = max(per_call.values(), default=0)
    return tuple(name for name, count in per_call.items() if count < 0.99 * most)


def updates(layer: Any) -> int | None:
    """How many batches the averages of a layer have seen, where it counts them."""
    count = getattr(layer, "num_batches_tracked", None)
    return None if count is None else int(count)


def window(layer: Any) -> float:
    """How many batches the moving averages reach back."""
    momentum = getattr(layer, "momentum", 0.1)
    return float(updates(layer) or math.inf) if momentum is None else 1 / momentum if momentum else math.inf


def lagging(layers: Mapping[str, nn.Module]) -> tuple[str, ...]:
    """Layers whose averages reach back a large part of the training, or to before it."""
    return tuple(name for name, layer in layers.items() if (steps := updates(layer)) and window(layer) >= LAG * steps)


def ranks_that_disagree(layers: Mapping[str, nn.Module]) -> tuple[str, ...]:
    """Layers whose averages differ between the processes of a group. Every rank has to call this."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return ()
    own = {name: _averages(layer) for name, layer in layers.items() if getattr(layer, "running_mean", None) is not None}
    gathered: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, own)
    return tuple(
        name for name in own if any(distance(averages[name], gathered[0][name]) > SKEW for averages in gathered)
    )


def distance(averages: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor], eps: float = 1e-5) -> float:
    """Between two means and variances, in standard deviations: the mean over channels."""
    pairs = ((m.cpu().double(), v.cpu().double().clamp(min=0) + eps) for m, v in (averages, other))
    (mean, var), (other_mean, other_var) = pairs
    deviation = torch.maximum(var, other_var).sqrt()
    return float(((mean - other_mean).abs() / deviation + (var / other_var).log().abs() / 2).mean())


def _averages(layer: Any) -> tuple[Tensor, Tensor]:
    return layer.running_mean.detach().cpu(), layer.running_var.detach().cpu()


def _is_updating(layer: Any) -> bool:
    return layer.training and not is_frozen(layer)


def _trainable(layer: nn.Module) -> list[bool]:
    return [parameter.requires_grad for part in gammas_and_betas(layer) for parameter in part]


def _of(names: tuple[str, ...], layers: Mapping[str, nn.Module]) -> str:
    return f"{'all' if len(names) == len(layers) else f'{len(names)} of'} {len(layers)} norm layers are"
