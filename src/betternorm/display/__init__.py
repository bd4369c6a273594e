"""Output: tables, progress bars, terminal colors, and graphs of layers."""
