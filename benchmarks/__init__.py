"""Cost of the layers against torch's own and against other ways to write ghost batch norm: python -m benchmarks."""
