"""Weight decay on gamma and beta where it can act, and decay of gamma toward 1 (section 3.3 of the paper)."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn, optim

from betternorm.display.tables import table
from betternorm.inspection import NormReport, gammas_and_betas, guess_input, norm_layers, norm_report

#: The kinds of parameters that get no decay unless :func:`param_groups` is told otherwise.
NO_DECAY = ("bias", "embedding", "position", "declared")

# What a parameter for positions, or a token of its own, is called; their types do not tell.
_POSITIONS = ("pos_emb", "position_emb", "relative_position", "cls_token", "class_token", "dist_token", "reg_token")

# The option of an optimizer's group that says which of its parameters are gammas on their way to 1. Options are saved
# with the optimizer's state.
_TOWARD_ONE = "decay_toward_one"


def param_groups(
    model: nn.Module,
    weight_decay: float,
    norm_decay: str | float = "auto",
    gamma_target: int = 0,
    *,
    no_decay: Iterable[str] = NO_DECAY,
    example_input: Any = None,
    report: NormReport | None = None,
    norm_types: tuple[type[nn.Module], ...] = (),
) -> ParamGroups:
    """Split the parameters of a model into groups for any torch optimizer, each parameter into exactly one.

    Weights are decayed; biases, embeddings and positional parameters are not; gammas and betas are where it can do
    something. Print the result to see what each parameter got and why.

    Args:
        model: any module. Norm layers are recognised by type: torch's, timm's, those of this library.
        weight_decay: the decay of the weights.
        norm_decay: the decay of gammas and betas. ``"auto"`` decays them by ``weight_decay`` in the layers that
            :func:`~betternorm.inspection.norm_report` finds to act on the output, and not in the others. ``"all"`` and
            ``"none"`` need no report, a number is a decay of their own for all of them.
        gamma_target: 0, or 1 to put the gammas into a group of their own, for :func:`decay_toward_one`. Until that is
            called on the optimizer they are decayed toward 0, which the paper found to be equally good.
        no_decay: what gets no decay: any of ``"bias"`` (everything with at most one dimension), ``"embedding"``,
            ``"position"`` (position embeddings and class tokens), ``"declared"`` (what ``no_weight_decay()`` of a timm
            model names), or patterns for names, such as ``"head.*"``.
        example_input: for ``"auto"``: what the model is called with. Guessed for image models and for networks that
            begin with a linear layer.
        report: for ``"auto"``: a report that was made before.
        norm_types: further classes to be taken as norm layers.

    Examples::

        >>> net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8))
        >>> groups = param_groups(net, weight_decay=5e-4)
        >>> {group["name"]: len(group["params"]) for group in groups}
        {'decay': 4, 'no decay': 4}
        >>> optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    """
    _check_decay("weight_decay", weight_decay)
    if isinstance(norm_decay, str):
        if norm_decay not in ("auto", "all", "none"):
            raise ValueError(f'norm_decay is {norm_decay!r}; it must be "auto", "all", "none" or a number')
    else:
        _check_decay("norm_decay", norm_decay)
    if gamma_target not in (0, 1):
        raise ValueError(f"gamma_target is {gamma_target!r}; it must be 0 or 1")

    parameters = list(model.named_parameters())
    if not parameters:
        raise ValueError(f"{type(model).__name__} has no parameters")
    layers = norm_layers(model, norm_types)
    kinds, patterns = _exceptions(model, no_decay)
    # From the general to the particular: each line overrules those above it.
    rules = {parameter: (float(weight_decay), "a weight") for _, parameter in parameters}
    rules |= kinds
    rules |= _norm_rules(model, layers, weight_decay, norm_decay, report, example_input, norm_types)
    rules |= patterns

    gammas = {gamma for layer in layers.values() for gamma in gammas_and_betas(layer)[0]}
    rows = []
    members: dict[tuple[float, int], list[nn.Parameter]] = {}
    for name, parameter in parameters:
        decay, why = rules[parameter]
        target = gamma_target if parameter in gammas and decay else 0
        members.setdefault((decay, target), []).append(parameter)
        rows.append(
            ParamRow(name, tuple(parameter.shape), _group_name(decay, target, weight_decay), decay, target, why)
        )
    groups = []
    for (decay, target), owned in members.items():
        group: dict[str, Any] = {
            "params": owned,
            "weight_decay": decay,
            "name": _group_name(decay, target, weight_decay),
        }
        if target:
            group[_TOWARD_ONE] = {"gammas": list(range(len(owned))), "weight_decay": None}
        groups.append(group)
    return ParamGroups(groups, rows)


@dataclass(frozen=True)
class ParamRow:
    """What one parameter got, and why."""

    name: str
    shape: tuple[int, ...]
    group: str
    weight_decay: float
    target: int
    why: str


class ParamGroups(list[dict[str, Any]]):
    """Groups for an optimizer, that print as a table of what each parameter got and why (in ``rows``)."""

    def __init__(self, groups: list[dict[str, Any]], rows: list[ParamRow]) -> None:
        super().__init__(groups)
        self.rows = rows

    def __str__(self) -> str:
        head = ("parameter", "shape", "group", "decay", "why")
        lines = [
            (row.name, "x".join(map(str, row.shape)) or "()", row.group, f"{row.weight_decay:g}", row.why)
            for row in self.rows
        ]
        counts = Counter(row.group for row in self.rows)
        return f"{table(head, lines)}\n\n{', '.join(f'{name}: {count}' for name, count in counts.items())}"


def decay_toward_one(
    optimizer: optim.Optimizer,
    model: nn.Module,
    weight_decay: float | None = None,
    *,
    decoupled: bool | None = None,
    norm_types: tuple[type[nn.Module], ...] = (),
) -> TowardOne:
    r"""Let an optimizer decay gammas toward 1 instead of 0, exactly as it decays everything else toward 0.

    A coupled optimizer (SGD, Adam) adds :math:`\lambda (\gamma - 1)` to the gradient of gamma, the derivative of the
    penalty :math:`\frac{\lambda}{2} (\gamma - 1)^2`; a decoupled one (AdamW) moves gamma by
    :math:`-\eta \lambda (\gamma - 1)` with its learning rate :math:`\eta`. Both follow learning rate schedules and
    changes of ``weight_decay`` in the groups, and work with foreach and fused optimizers, closures and gradient
    scaling.

    Which gammas are decayed is written into the optimizer's groups, so it is saved and loaded with the optimizer's
    state; call this function again on an optimizer that was built anew, before or after loading.

    Args:
        optimizer: from groups of :func:`param_groups` with ``gamma_target=1``, only the gammas there are decayed toward
            1; otherwise every gamma of the model that the optimizer holds.
        model: the model whose norm layers have the gammas.
        weight_decay: the decay of gammas. Default: that of the optimizer's group.
        decoupled: whether the optimizer's decay is decoupled from the gradient. Known for the optimizers of torch.
        norm_types: further classes to be taken as norm layers.

    Returns:
        a handle whose ``remove()`` leaves the optimizer as it was.
    """
    if weight_decay is not None:
        _check_decay("weight_decay", weight_decay)
    if optimizer in _active:
        raise ValueError("this optimizer decays gammas toward 1 already; call remove() on the first handle before")
    for group in optimizer.param_groups:
        if "weight_decay" not in group:
            raise ValueError(f"{type(optimizer).__name__} has no weight_decay, so there is nothing to redirect")
        _is_decoupled(optimizer, group, decoupled)
    before = [group.get(_TOWARD_ONE) for group in optimizer.param_groups]
    if not any(before):
        gammas = {g for layer in norm_layers(model, norm_types).values() for g in gammas_and_betas(layer)[0]}
        if not gammas:
            raise ValueError(f"{type(model).__name__} has no norm layers with a gamma")
        _choose(optimizer, gammas, weight_decay)
    elif weight_decay is not None:
        for group in optimizer.param_groups:
            if group.get(_TOWARD_ONE):
                group[_TOWARD_ONE] = {**group[_TOWARD_ONE], "weight_decay": weight_decay}
    _active[optimizer] = handle = TowardOne(optimizer, decoupled, before)
    return handle


class TowardOne:
    """Decay of gammas toward 1 at work in an optimizer; ``remove()`` ends it and restores the optimizer."""

    def __init__(self, optimizer: optim.Optimizer, decoupled: bool | None, before: list[Any]) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._decoupled = decoupled
        self._before = before
        self._chosen = [group.get(_TOWARD_ONE) for group in optimizer.param_groups]
        self._gradients: list[tuple[Tensor, Tensor]] = []
        self._moves: list[tuple[Tensor, Tensor]] = []
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_load_state_dict_post_hook(self._after_load),
        ]

    def remove(self) -> None:
        """Take decay toward 1 out of the optimizer again."""
        for hook in self._hooks:
            hook.remove()
        optimizer = self._optimizer()
        if optimizer is None or optimizer not in _active:
            return
        del _active[optimizer]
        for group, before in zip(optimizer.param_groups, self._before, strict=False):
            if before is None:
                group.pop(_TOWARD_ONE, None)
            else:
                group[_TOWARD_ONE] = before

    def _before_step(self, optimizer: optim.Optimizer, arguments: Any, keywords: Any) -> Any:
        with torch.no_grad():
            self._moves = self._decoupled_moves(optimizer)
        positional = len(arguments) > 1  # the first is the optimizer itself
        closure = arguments[1] if positional else keywords.get("closure")
        if closure is None:
            self._redirect_gradients(optimizer)
            return None
        wrapped = self._around(closure, optimizer)  # the gradients are only there when the closure has run
        if positional:
            return (arguments[0], wrapped, *arguments[2:]), keywords
        return arguments, {**keywords, "closure": wrapped}

    def _after_step(self, optimizer: optim.Optimizer, *_: Any) -> None:
        self._restore_gradients()
        found_inf = getattr(optimizer, "found_inf", None)  # a fused optimizer skips the step by itself
        with torch.no_grad():
            for gamma, move in self._moves:
                if gamma.grad is not None:
                    gamma.add_(move if found_inf is None else move * (found_inf.to(move) == 0))
        self._moves = []

    def _after_load(self, optimizer: optim.Optimizer) -> None:
        """A state saved with decay toward 1 brings its own choice; one saved without it leaves ours."""
        if not any(group.get(_TOWARD_ONE) for group in optimizer.param_groups):
            for group, chosen in zip(optimizer.param_groups, self._chosen, strict=False):
                if chosen is not None:
                    group[_TOWARD_ONE] = chosen

    def _around(self, closure: Callable[[], Any], optimizer: optim.Optimizer) -> Callable[[], Any]:
        def evaluate() -> Any:
            self._restore_gradients()
            loss = closure()
            self._redirect_gradients(optimizer)
            return loss

        return evaluate

    def _redirect_gradients(self, optimizer: optim.Optimizer) -> None:
        """What the optimizer will add as decay toward 0 is turned into decay toward 1, in a copy of the gradient."""
        scale = getattr(optimizer, "grad_scale", None)  # set where a fused optimizer is to unscale by itself
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


# --- rules for parameters -------------------------------------------------------------------------------------------

Rules = dict[nn.Parameter, tuple[float, str]]  # decay, and why


def _norm_rules(
    model: nn.Module,
    layers: dict[str, nn.Module],
    weight_decay: float,
    norm_decay: str | float,
    report: NormReport | None,
    example_input: Any,
    norm_types: tuple[type[nn.Module], ...],
) -> Rules:
    """Decay and reason for each gamma and beta."""
    if norm_decay == "auto" and weight_decay and layers:
        if report is None:
            report = _quick_report(model, example_input, norm_types)
        known = {row.name: row for row in report}
        missing = [name for name in layers if name not in known]
        if missing:
            raise ValueError(f"report knows nothing of the norm layer {missing[0]!r}; make it from this model")
        judged = {
            name: (float(weight_decay) if row.acts else 0.0, f"norm layer: {row.why}") for name, row in known.items()
        }
    else:
        decay = {"auto": weight_decay, "all": weight_decay, "none": 0.0}.get(str(norm_decay), norm_decay)
        judged = dict.fromkeys(layers, (float(decay), f"norm layer, norm_decay={norm_decay!r}"))
    rules: Rules = {}
    for name, layer in layers.items():
        for parameter in (p for part in gammas_and_betas(layer) for p in part):
            # A parameter that layers share is decayed if it acts in any of them.
            rules[parameter] = max(rules.get(parameter, judged[name]), judged[name])
    return rules


def _quick_report(model: nn.Module, example_input: Any, norm_types: tuple[type[nn.Module], ...]) -> NormReport:
    try:
        example = guess_input(model) if example_input is None else example_input
    except ValueError as error:
        raise ValueError(
            f'norm_decay="auto" runs the model once, and {error}; or norm_decay="all" or "none"'
        ) from error
    return norm_report(model, example, quick=True, norm_types=norm_types)


def _exceptions(model: nn.Module, no_decay: Iterable[str]) -> tuple[Rules, Rules]:
    """The parameters that get no decay, with the reason: those of a kind, and those named by a pattern."""
    if isinstance(no_decay, str):
        raise ValueError(f"no_decay is the string {no_decay!r}; give a list of kinds or patterns")
    wanted = list(no_decay)
    named = list(model.named_parameters(remove_duplicate=False))
    kinds: Rules = {}
    if "bias" in wanted:
        kinds |= {p: (0.0, "a bias or scale: one dimension") for _, p in named if p.dim() <= 1}
    if "position" in wanted:
        last_words = [(name.rpartition(".")[2], p) for name, p in named]
        kinds |= {
            p: (0.0, "a position embedding or token") for word, p in last_words if any(w in word for w in _POSITIONS)
        }
    if "embedding" in wanted:
        embeddings = {id(m.weight) for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))}
        kinds |= {p: (0.0, "an embedding") for _, p in named if id(p) in embeddings}
    if "declared" in wanted:
        declared = _declared(model)
        kinds |= {p: (0.0, "named by the model's no_weight_decay()") for name, p in named if name in declared}
    patterns: Rules = {}
    for pattern in (word for word in wanted if word not in NO_DECAY):
        matching: Rules = {p: (0.0, f"matches {pattern!r}") for name, p in named if fnmatchcase(name, pattern)}
        if not matching:
            raise ValueError(f"no_decay has {pattern!r}, which is no kind ({', '.join(NO_DECAY)}) and matches no name")
        patterns |= matching
    return kinds, patterns


def _declared(model: nn.Module) -> set[str]:
    names = set()
    for prefix, module in model.named_modules():
        declare = getattr(module, "no_weight_decay", None)
        if callable(declare):
            names |= {f"{prefix}.{name}" if prefix else name for name in declare()}
    return names


def _group_name(decay: float, target: int, weight_decay: float) -> str:
    if target:
        return "gamma toward 1"
    if not decay:
        return "no decay"
    return "decay" if decay == weight_decay else "norm decay"


def _check_decay(argument: str, value: Any) -> None:
    if not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        raise ValueError(f"{argument} is {value!r}; it must be a number of 0 or more")


# --- decay toward 1 -------------------------------------------------------------------------------------------------

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


def _is_decoupled(optimizer: optim.Optimizer, group: dict[str, Any], told: bool | None) -> bool:
    if told is not None:
        return told
    if isinstance(optimizer, _DECOUPLED):
        return True
    if "decoupled_weight_decay" in group:
        return bool(group["decoupled_weight_decay"])
    if isinstance(optimizer, _COUPLED):
        return False
    raise ValueError(
        f"{type(optimizer).__name__} is not an optimizer of torch: say decoupled=True if it decays the parameters "
        "themselves, as AdamW, or decoupled=False if it adds to the gradient, as SGD"
    )


def _choose(optimizer: optim.Optimizer, gammas: set[nn.Parameter], weight_decay: float | None) -> None:
    """Write into the groups which of their parameters are decayed toward 1."""
    positions = [
        [i for i, parameter in enumerate(group["params"]) if parameter in gammas] for group in optimizer.param_groups
    ]
    if not any(positions):
        raise ValueError("the optimizer holds none of the model's gammas")
    held = [group for group, found in zip(optimizer.param_groups, positions, strict=True) if found]
    if weight_decay is None and not any(group["weight_decay"] for group in held):
        raise ValueError("weight_decay is 0 in every group with gammas; say how much, as in weight_decay=5e-4")
    for group, found in zip(optimizer.param_groups, positions, strict=True):
        if found:
            group[_TOWARD_ONE] = {"gammas": found, "weight_decay": weight_decay}


def _gammas_of(group: dict[str, Any]) -> list[Tensor]:
    chosen = group.get(_TOWARD_ONE)
    return [group["params"][i] for i in chosen["gammas"]] if chosen else []


def _change_of_decay(group: dict[str, Any], gamma: Tensor) -> Tensor:
    """The wanted wd' (gamma - 1) less the wd gamma that the optimizer adds by itself."""
    own, wanted = group["weight_decay"], group[_TOWARD_ONE]["weight_decay"]
    wanted = own if wanted is None else wanted
    change: Tensor = (wanted - own) * gamma - wanted
    return change
