"""Micro-batches in one pass equal torch's batch norm with accumulated gradients."""

import pytest
import torch
from betternorm_lab.evidence.small_batches import MicroBatchNorm
from torch import nn


@pytest.mark.parametrize("size", [2, 4, 16])
def test_micro_batch_norm_equals_torch_on_one_micro_batch_after_another(size):
    torch.manual_seed(0)
    ours, torchs = MicroBatchNorm(6, size), nn.BatchNorm2d(6)
    with torch.no_grad():
        ours.weight.copy_(torch.rand(6) + 0.5)
        torchs.weight.copy_(ours.weight)
    for _ in range(3):
        x = (torch.randn(16, 6, 5, 5) * 2 + 1).requires_grad_()
        y = x.detach().clone().requires_grad_()
        target = torch.randn(16, 6, 5, 5)
        (ours(x) * target).sum().backward()
        for part, their in zip(y.split(size), target.split(size), strict=True):
            (torchs(part) * their).sum().backward()
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.weight.grad, torchs.weight.grad, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(ours.running_mean, torchs.running_mean)
    torch.testing.assert_close(ours.running_var, torchs.running_var)
    z = torch.randn(3, 6, 5, 5)
    torch.testing.assert_close(ours.eval()(z), torchs.eval()(z))


def test_averages_tracked_in_the_last_epoch_alone_are_those_of_all_steps():
    torch.manual_seed(0)
    late, always = MicroBatchNorm(4, 16, track_from=10), MicroBatchNorm(4, 16)
    for _ in range(10 + 78):
        x = torch.randn(128, 4, 2, 2)
        late(x), always(x)
    torch.testing.assert_close(late.running_mean, always.running_mean)
    torch.testing.assert_close(late.running_var, always.running_var)
