"""Trained weights, to begin another training from."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn

from betternorm.cli import UserError
from betternorm.integrations.checkpoints import read_checkpoint, state_dict_of


def load_weights(model: nn.Module, path: str | Path) -> None:
    """Load trained weights, leaving a classifier for other classes as it was initialised.

    A prefix ``module.`` is dropped. Everything but the last linear layer has to fit.
    """
    state = {name.removeprefix("module."): value for name, value in read_weights(Path(path)).items()}
    # An alpha belongs to the task it was tuned for.
    state = {name: value for name, value in state.items() if not name.endswith(".alpha")}
    own = model.state_dict()
    head = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)][-1:]
    in_head = {name for name in own if head and name.startswith(f"{head[0]}.")}
    other_head = any(name in state and state[name].shape != own[name].shape for name in in_head)
    if other_head:
        state = {name: value for name, value in state.items() if name not in in_head}
    unknown = [name for name in state if name not in own]
    missing = [
        name for name in own if name not in state and name not in in_head and not name.endswith("num_batches_tracked")
    ]
    different = [name for name in state if name in own and state[name].shape != own[name].shape]
    for problem, names in (("lacks", missing), ("has no place for", unknown), ("has another shape of", different)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise UserError(f"{path} does not fit this network: it {problem} {names[0]}{more}")
    model.load_state_dict(state, strict=False)


def read_weights(path: Path) -> dict[str, Tensor]:
    """The state dict in a file, on the CPU, under whatever key its trainer put it."""
    try:
        weights: dict[str, Tensor] = state_dict_of(read_checkpoint(path))
    except UserError as problem:
        message = str(problem)
        raise UserError(message if str(path) in message else f"checkpoint {path}: {message}") from problem
    return weights
