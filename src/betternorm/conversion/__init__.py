"""Replacing the norm layers of a model, undoing it, and folding them for serving."""

from betternorm.conversion.convert import changes, convert, revert
from betternorm.conversion.fold import fold

__all__ = ["changes", "convert", "fold", "revert"]
