"""Four improvements to batch normalisation, on any PyTorch model."""

__version__ = "0.1.0"
