"""Checks of arguments that the layers share."""

from __future__ import annotations


def check_group_size(name: str, value: int, alternative: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} must be a whole number of 1 or more{alternative}")
    if value < 1:
        raise ValueError(f"{name}={value} must be 1 or more{alternative}")


def channels_in_group(num_groups: int, num_channels: int) -> int:
    """How many channels a group has; one where there are more groups than channels."""
    check_group_size("num_groups", num_groups)
    if num_groups >= num_channels:
        return 1
    if num_channels % num_groups:
        raise ValueError(
            f"num_groups={num_groups} does not divide the {num_channels} channels; {divisors_text(num_channels)} would"
        )
    return num_channels // num_groups


def checked_alpha(value: float) -> float:
    value = float(value)
    if not 0 <= value <= 1:  # false for NaN too
        raise ValueError(f"alpha={value} must lie between 0 (moving averages alone) and 1 (the example alone)")
    return value


def divisors_text(number: int) -> str:
    found = [str(d) for d in range(1, number + 1) if number % d == 0]
    return ", ".join(found[:-1]) + f" or {found[-1]}" if len(found) > 1 else found[0]
