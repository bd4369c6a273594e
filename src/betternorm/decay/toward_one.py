"""Weight decay of gamma toward 1, for any torch optimizer (section 3.3 of the paper)."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn, optim

from betternorm.decay.norms import gammas_and_betas, norm_layers

# The option of a parameter group that lists which of its parameters decay toward 1. Options are saved in the
# optimizer's state_dict.
TOWARD_ONE = "decay_toward_one"


def decay_toward_one(
    optimizer: optim.Optimizer,
    model: nn.Module,
    weight_decay: float | None = None,
    *,
    decoupled: bool | None = None,
    norm_types: tuple[type[nn.Module], ...] = (),
) -> TowardOne:
    r"""Make an optimizer decay gammas toward 1 instead of 0.

    A coupled optimizer (SGD, Adam) adds :math:`\lambda (\gamma - 1)` to the gradient of gamma, the derivative of the
    penalty :math:`\frac{\lambda}{2} (\gamma - 1)^2`; a decoupled one (AdamW) moves gamma by
    :math:`-\eta \lambda (\gamma - 1)` with its learning rate :math:`\eta`. Both follow learning rate schedules and
    changes of ``weight_decay`` in the groups, and work with foreach and fused optimizers, closures and gradient
    scaling.

    The selected gammas are stored in the parameter groups, so they are part of the optimizer's ``state_dict``. Call
    this function again on a new optimizer, before or after loading its state.

    Args:
        optimizer: if it was created from :func:`param_groups` with ``gamma_target=1``, the gammas in that group decay
            toward 1, otherwise all gammas of the model that the optimizer has.
        model: the model.
        weight_decay: weight decay of the gammas. Default: that of the parameter group.
        decoupled: whether the optimizer's weight decay is decoupled from the gradient. Only needed for optimizers that
            are not torch's.
        norm_types: additional classes of norm layers.

    Returns:
        A handle whose ``remove()`` restores the optimizer.
    """
    if weight_decay is not None:
        check_decay("weight_decay", weight_decay)
    if optimizer in _active:
        raise ValueError("this optimizer already decays gammas toward 1; call remove() on the first handle before")
    for group in optimizer.param_groups:
        if "weight_decay" not in group:
            raise ValueError(f"{type(optimizer).__name__} has no weight_decay, which decay toward 1 needs")
        _is_decoupled(optimizer, group, decoupled)
    before = [group.get(TOWARD_ONE) for group in optimizer.param_groups]
    if not any(before):
        gammas = {g for layer in norm_layers(model, norm_types).values() for g in gammas_and_betas(layer)[0]}
        if not gammas:
            raise ValueError(f"{type(model).__name__} has no norm layers with a gamma")
        _choose(optimizer, gammas, weight_decay)
    elif weight_decay is not None:
        for group in optimizer.param_groups:
            if group.get(TOWARD_ONE):
                group[TOWARD_ONE] = {**group[TOWARD_ONE], "weight_decay": weight_decay}
    _active[optimizer] = handle = TowardOne(optimizer, decoupled, before)
    return handle


class TowardOne:
    """Handle for the decay of gammas toward 1 in an optimizer."""

    def __init__(self, optimizer: optim.Optimizer, decoupled: bool | None, before: list[Any]) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._decoupled = decoupled
        self._before = before
        self._chosen = [group.get(TOWARD_ONE) for group in optimizer.param_groups]
        self._gradients: list[tuple[Tensor, Tensor]] = []
        self._moves: list[tuple[Tensor, Tensor]] = []
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_load_state_dict_post_hook(self._after_load),
        ]

    def remove(self) -> None:
        """Stop decay toward 1 and restore the optimizer."""
        for hook in self._hooks:
            hook.remove()
        optimizer = self._optimizer()
        if optimizer is None or optimizer not in _active:
            return
        del _active[optimizer]
        for group, before in zip(optimizer.param_groups, self._before, strict=False):
            if before is None:
                group.pop(TOWARD_ONE, None)
            else:
                group[TOWARD_ONE] = before

    def _before_step(self, optimizer: optim.Optimizer, arguments: Any, keywords: Any) -> Any:
        with torch.no_grad():
            self._moves = self._decoupled_moves(optimizer)
        positional = len(arguments) > 1  # the first is the optimizer itself
        closure = arguments[1] if positional else keywords.get("closure")
        if closure is None:
            self._redirect_gradients(optimizer)
            return None
        wrapped = self._around(closure, optimizer)  # the closure computes the gradients
        if positional:
            return (arguments[0], wrapped, *arguments[2:]), keywords
        return arguments, {**keywords, "closure": wrapped}

    def _after_step(self, optimizer: optim.Optimizer, *_: Any) -> None:
        self._restore_gradients()
        found_inf = getattr(optimizer, "found_inf", None)  # a fused optimizer skips the step itself
        with torch.no_grad():
            for gamma, move in self._moves:
                if gamma.grad is not None:
                    gamma.add_(move if found_inf is None else move * (found_inf.to(move) == 0))
        self._moves = []

    def _after_load(self, optimizer: optim.Optimizer) -> None:
        """Keep the selected gammas if the loaded state has none."""
        if not any(group.get(TOWARD_ONE) for group in optimizer.param_groups):
            for group, chosen in zip(optimizer.param_groups, self._chosen, strict=False):
                if chosen is not None:
                    group[TOWARD_ONE] = chosen

    def _around(self, closure: Callable[[], Any], optimizer: optim.Optimizer) -> Callable[[], Any]:
        def evaluate() -> Any:
            self._restore_gradients()
            loss = closure()
            self._redirect_gradients(optimizer)
            return loss

        return evaluate

    def _redirect_gradients(self, optimizer: optim.Optimizer) -> None:
        """Change a copy of the gradient such that the optimizer's decay toward 0 becomes decay toward 1."""
        scale = getattr(optimizer, "grad_scale", None)  # set if a fused optimizer unscales the gradient itself
        for group in optimizer.param_groups:
            if _is_decoupled(optimizer, group, self._decoupled):
                continue
            for gamma in _gammas_of(group):
                if gamma.grad is None:
                    continue
                change = _change_of_decay(group, gamma.detach())
                if group.get("maximize"):
                    change = -change
                if scale is not None:
                    change = change * scale.to(gamma.device)
                self._gradients.append((gamma, gamma.grad))
                gamma.grad = gamma.grad + change.to(gamma.grad.dtype)

    def _restore_gradients(self) -> None:
        for gamma, gradient in self._gradients:
            gamma.grad = gradient
        self._gradients = []

    def _decoupled_moves(self, optimizer: optim.Optimizer) -> list[tuple[Tensor, Tensor]]:
        return [
            (gamma, -group["lr"] * _change_of_decay(group, gamma))
            for group in optimizer.param_groups
            if _is_decoupled(optimizer, group, self._decoupled)
            for gamma in _gammas_of(group)
        ]


_active: weakref.WeakKeyDictionary[optim.Optimizer, TowardOne] = weakref.WeakKeyDictionary()

_DECOUPLED = (optim.AdamW, optim.Adafactor)
_COUPLED = (
    optim.SGD,
    optim.Adam,
    optim.NAdam,
    optim.RAdam,
    optim.Adamax,
    optim.Adagrad,
    optim.Adadelta,
    optim.RMSprop,
    optim.ASGD,
)


def _is_decoupled(optimizer: optim.Optimizer, group: dict[str, Any], decoupled: bool | None) -> bool:
    if decoupled is not None:
        return decoupled
    if isinstance(optimizer, _DECOUPLED):
        return True
    if "decoupled_weight_decay" in group:
        return bool(group["decoupled_weight_decay"])
    if isinstance(optimizer, _COUPLED):
        return False
    raise ValueError(
        f"{type(optimizer).__name__} is not an optimizer of torch; pass decoupled=True if it decays the parameters "
        "directly, like AdamW, or decoupled=False if it adds to the gradient, like SGD"
    )


def _choose(optimizer: optim.Optimizer, gammas: set[nn.Parameter], weight_decay: float | None) -> None:
    """Store in the parameter groups which of their parameters decay toward 1."""
    positions = [
        [i for i, parameter in enumerate(group["params"]) if parameter in gammas] for group in optimizer.param_groups
    ]
    if not any(positions):
        raise ValueError("the optimizer has none of the model's gammas")
    with_gammas = [group for group, indices in zip(optimizer.param_groups, positions, strict=True) if indices]
    if weight_decay is None and not any(group["weight_decay"] for group in with_gammas):
        raise ValueError("weight_decay is 0 in all groups with gammas; pass a value, for example weight_decay=5e-4")
    for group, indices in zip(optimizer.param_groups, positions, strict=True):
        if indices:
            group[TOWARD_ONE] = {"gammas": indices, "weight_decay": weight_decay}


def _gammas_of(group: dict[str, Any]) -> list[Tensor]:
    chosen = group.get(TOWARD_ONE)
    return [group["params"][i] for i in chosen["gammas"]] if chosen else []


def _change_of_decay(group: dict[str, Any], gamma: Tensor) -> Tensor:
    """wd' (gamma - 1), minus the wd gamma that the optimizer itself adds."""
    own, wanted = group["weight_decay"], group[TOWARD_ONE]["weight_decay"]
    wanted = own if wanted is None else wanted
    change: Tensor = (wanted - own) * gamma - wanted
    return change


def check_decay(argument: str, value: Any) -> None:
    if not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        raise ValueError(f"{argument} is {value!r}; it must be a number of 0 or more")
