"""Renamed parameters: the old name works for one release, with a DeprecationWarning."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def renamed_parameters(**new_names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Accept old keyword names; a new name that starts with "not " takes the opposite of the old value."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def with_old_names(*args: P.args, **kwargs: P.kwargs) -> R:
            for old in new_names.keys() & kwargs.keys():
                new = new_names[old].removeprefix("not ")
                if new in kwargs:
                    raise TypeError(f"{function.__name__}() got both {new!r} and its old name {old!r}")
                warnings.warn(f"{old!r} is deprecated; use {new!r}", DeprecationWarning, stacklevel=2)
                value = kwargs.pop(old)
                kwargs[new] = not value if new_names[old].startswith("not ") else value
            return function(*args, **kwargs)

        return with_old_names

    return decorate
