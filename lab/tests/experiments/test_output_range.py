"""Equation 2: the output in training lies within sqrt(B - 1), and that is tight; at inference it does not."""

import math

import pytest
import torch
from betternorm_lab.experiments.output_range import Extremes
from betternorm_lab.trials import Runtime

from betternorm import GhostBatchNorm


@pytest.mark.parametrize("values", [2, 5, 32, 257])
def test_adversarial_inputs_reach_the_bound_and_never_pass_it(values, tmp_path):
    found = Extremes(values=values, attempts=16, steps=120).run(tmp_path, Runtime(), lambda part: None)
    bound = math.sqrt(values - 1)
    assert found["bound"] == bound
    for reached in (-found["minimum"], found["maximum"]):
        assert 0.999 * bound <= reached <= bound * (1 + 1e-9)
    assert -found["inference_minimum"] > bound
    assert found["inference_maximum"] > bound


def test_gradient_ascent_alone_finds_the_bound(tmp_path):
    found = Extremes(values=8, attempts=16, steps=150).run(tmp_path, Runtime(), lambda part: None)
    assert found["ascent_maximum"] >= 0.999 * found["bound"]
    assert -found["ascent_minimum"] >= 0.999 * found["bound"]


@pytest.mark.parametrize("ghost_size", [2, 8])
def test_the_bound_counts_the_examples_of_a_ghost_times_space(ghost_size):
    """B is the number of values that a mean is taken over."""
    layer = GhostBatchNorm(1, ghost_size=ghost_size).train()
    images = torch.zeros(16, 1, 4, 4)
    images[0, 0, 0, 0] = 1e4
    assert layer(images).max().item() == pytest.approx(math.sqrt(ghost_size * 16 - 1), rel=1e-4)
