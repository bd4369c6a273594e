"""What can go wrong by a user's hand, and what a user is warned of."""

from __future__ import annotations


class UserError(ValueError):
    """Bad usage or input. A command shows it as one line, without a traceback."""


class UncertainGainWarning(UserWarning):
    """The gain of the alpha that was found is not distinguishable from zero."""
