"""Optimizer parameter groups: weight decay on gamma and beta where it has an effect (section 3.3 of the paper)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from betternorm.decay.norms import gammas_and_betas, norm_layers
from betternorm.decay.report import NormReport, norm_report
from betternorm.decay.toward_one import TOWARD_ONE, check_decay
from betternorm.decay.visit import guess_input
from betternorm.display.tables import table

#: The kinds of parameters without weight decay by default.
NO_DECAY = ("bias", "embedding", "position", "declared")

# Names of position embeddings and tokens, which have no type by which to recognize them.
_POSITIONS = ("pos_emb", "position_emb", "relative_position", "cls_token", "class_token", "dist_token", "reg_token")


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
    """Split the parameters of a model into groups for any torch optimizer.

    Weight decay applies to weights, not to biases, embeddings and position embeddings, and to gammas and betas where it
    has an effect. Print the result for a table of all parameters with the reasons.

    Args:
        model: any module. Norm layers are recognized by type: those of torch, timm and this library.
        weight_decay: weight decay of the weights.
        norm_decay: weight decay of gammas and betas. ``"auto"`` is ``weight_decay`` in the layers where
            :func:`~betternorm.norm_report` measures an effect, and 0 in the others. ``"all"`` and ``"none"`` apply to
            all layers without a report, and so does a number.
        gamma_target: 0, or 1 to put the gammas into a separate group for :func:`decay_toward_one`. Until that function
            is called on the optimizer, they decay toward 0.
        no_decay: parameters without weight decay: any of ``"bias"`` (everything with at most one dimension),
            ``"embedding"``, ``"position"`` (position embeddings and class tokens), ``"declared"`` (those listed by
            ``no_weight_decay()`` of a timm model), or name patterns such as ``"head.*"``.
        example_input: for ``"auto"``: what the model is called with. It is guessed for image models and for models that
            begin with a linear layer.
        report: for ``"auto"``: an existing report.
        norm_types: additional classes of norm layers.

    Returns:
        A list of parameter groups. Each parameter is in exactly one of them.

    Examples::

        >>> net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8))
        >>> groups = param_groups(net, weight_decay=5e-4)
        >>> {group["name"]: len(group["params"]) for group in groups}
        {'decay': 4, 'no decay': 4}
        >>> optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    """
    check_decay("weight_decay", weight_decay)
    if isinstance(norm_decay, str):
        if norm_decay not in ("auto", "all", "none"):
            raise ValueError(f'norm_decay is {norm_decay!r}; it must be "auto", "all", "none" or a number')
    else:
        check_decay("norm_decay", norm_decay)
    if gamma_target not in (0, 1):
        raise ValueError(f"gamma_target is {gamma_target!r}; it must be 0 or 1")

    parameters = list(model.named_parameters())
    if not parameters:
        raise ValueError(f"{type(model).__name__} has no parameters")
    layers = norm_layers(model, norm_types)
    kinds, patterns = _exceptions(model, no_decay)
    # Later rules override earlier ones.
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
            group[TOWARD_ONE] = {"gammas": list(range(len(owned))), "weight_decay": None}
        groups.append(group)
    return ParamGroups(groups, rows)


@dataclass(frozen=True)
class ParamRow:
    """Group and weight decay of one parameter, with the reason."""

    name: str
    shape: tuple[int, ...]
    group: str
    weight_decay: float
    target: int
    why: str


class ParamGroups(list[dict[str, Any]]):
    """Parameter groups for an optimizer. They print as a table of all parameters, which is also in ``rows``."""

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
    """Weight decay and reason for each gamma and beta."""
    if norm_decay == "auto" and weight_decay and layers:
        if report is None:
            report = _quick_report(model, example_input, norm_types)
        known = {row.name: row for row in report}
        missing = [name for name in layers if name not in known]
        if missing:
            raise ValueError(f"report does not contain the norm layer {missing[0]!r}; create it from this model")
        by_layer = {
            name: (float(weight_decay) if row.acts else 0.0, f"norm layer: {row.why}") for name, row in known.items()
        }
    else:
        decay = {"auto": weight_decay, "all": weight_decay, "none": 0.0}.get(str(norm_decay), norm_decay)
        by_layer = dict.fromkeys(layers, (float(decay), f"norm layer, norm_decay={norm_decay!r}"))
    rules: Rules = {}
    for name, layer in layers.items():
        for parameter in (p for part in gammas_and_betas(layer) for p in part):
            # A shared parameter is decayed if that has an effect in any of its layers.
            rules[parameter] = max(rules.get(parameter, by_layer[name]), by_layer[name])
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
    """The parameters without weight decay, with the reason: by kind, and by name pattern."""
    if isinstance(no_decay, str):
        raise ValueError(f"no_decay is the string {no_decay!r}; pass a list of kinds or patterns")
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
        kinds |= {p: (0.0, "listed by the model's no_weight_decay()") for name, p in named if name in declared}
    patterns: Rules = {}
    for pattern in (word for word in wanted if word not in NO_DECAY):
        matching: Rules = {p: (0.0, f"matches {pattern!r}") for name, p in named if fnmatchcase(name, pattern)}
        if not matching:
            raise ValueError(
                f"no_decay has {pattern!r}, which is neither a kind ({', '.join(NO_DECAY)}) nor matches a name"
            )
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
