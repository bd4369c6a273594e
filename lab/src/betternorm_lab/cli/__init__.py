"""The commands of the lab, one module for each."""
