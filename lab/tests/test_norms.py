"""The norm layers that only experiments need, against torch's own in the cases that are one of those."""

import pytest
import torch
from betternorm_lab import norms
from betternorm_lab.models import build
from torch import nn
from torch.nn import functional as F

CHANNELS = 8


@pytest.fixture
def images():
    return 2 * torch.randn(6, CHANNELS, 5, 5, generator=torch.Generator().manual_seed(0)) + 1


@pytest.mark.parametrize(
    "layer",
    [
        norms.NoisyGroupNorm(CHANNELS, 4, strength=0.0),
        norms.RandomGroupNorm(CHANNELS, 4, share=0.0),
        norms.RandomGroupNorm(CHANNELS, 1),
        norms.RandomGroupNorm(CHANNELS, 8),
        norms.ChangingGroupNorm(CHANNELS, first=4, last=4),
        norms.EvenGroupNorm(CHANNELS, elements=50),
    ],
    ids=lambda layer: f"{type(layer).__name__}-{CHANNELS // layer.channels_per_group}",
)
def test_undisturbed_they_are_group_norm_in_training_and_at_inference(layer, images):
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    found = layer.train()(images)
    expected = F.group_norm(images, CHANNELS // layer.channels_per_group, layer.weight, layer.bias)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(layer.eval()(images), expected)
    torch.testing.assert_close(layer.running_mean, 0.1 * images.mean((0, 2, 3)))


def test_noise_is_as_large_as_statistics_differ_between_examples(images):
    layer = norms.NoisyGroupNorm(CHANNELS, 2, strength=1.0).train()
    torch.manual_seed(0)
    first, second = layer(images), layer(images)
    assert not torch.equal(first, second)
    alike = images[:1].expand(6, -1, -1, -1)  # no example differs from another: no noise
    layer = norms.NoisyGroupNorm(CHANNELS, 2, strength=1.0).train()
    torch.testing.assert_close(layer(alike), F.group_norm(alike, 2))


def test_random_groups_normalize_each_group_that_was_drawn(images):
    torch.manual_seed(3)
    found = norms.RandomGroupNorm(CHANNELS, 2).train()(images)
    torch.manual_seed(3)
    torch.rand(())
    order = torch.randperm(CHANNELS)
    expected = F.group_norm(images[:, order], 2)
    torch.testing.assert_close(found[:, order], expected)


def test_the_number_of_groups_goes_from_first_to_last(images):
    layer = norms.ChangingGroupNorm(CHANNELS, first=1, last=8, steps=3).train()
    seen = []
    for _ in range(5):
        layer(images)
        seen.append(CHANNELS // layer.channels_per_group)
    assert seen == [1, 2, 4, 8, 8]
    loaded = norms.ChangingGroupNorm(CHANNELS, first=1, last=8, steps=3)
    loaded.load_state_dict(layer.state_dict())
    torch.testing.assert_close(loaded.eval()(images), layer.eval()(images))


def test_groups_of_a_constant_number_of_values_have_fewer_channels_where_maps_are_large(images):
    layer = norms.EvenGroupNorm(CHANNELS, elements=100).train()
    layer(images)
    assert layer.channels_per_group == 4
    layer(torch.randn(2, CHANNELS, 10, 10))
    assert layer.channels_per_group == 1


@pytest.mark.parametrize(("place", "other"), [(0, nn.BatchNorm2d), (1, nn.InstanceNorm2d), (2, nn.GroupNorm)])
def test_switchable_norm_is_each_of_its_parts_where_that_has_all_the_weight(place, other, images):
    layer = norms.SwitchableNorm(CHANNELS).train()
    with torch.no_grad():
        for weight in (layer.mean_weight, layer.var_weight):
            weight.fill_(-1e4)[place] = 1e4
    peer = other(1, CHANNELS) if other is nn.GroupNorm else other(CHANNELS)
    torch.testing.assert_close(layer(images), peer.train()(images))
    if other is nn.BatchNorm2d:
        torch.testing.assert_close(layer.running_mean, peer.running_mean)
    else:
        torch.testing.assert_close(layer.eval()(images), peer.eval()(images))


@pytest.mark.parametrize(
    ("norm", "options"),
    [
        ("noisy_group", {"num_groups": 4}),
        ("random_group", {"num_groups": 4, "share": 0.5}),
        ("changing_group", {"first": 2, "last": 4, "steps": 2}),
        ("even_group", {"elements": 64}),
        ("switchable", {}),
    ],
)
def test_networks_are_built_with_them_and_learn(norm, options):
    network = build("resnet18", 3, width=8, blocks=(1, 1), norm=f"betternorm_lab.norms:{norm}", norm_options=options)
    assert not any(type(module) is nn.BatchNorm2d for module in network.modules())
    loss = F.cross_entropy(network(torch.randn(4, 3, 8, 8)), torch.tensor([0, 1, 2, 0]))
    loss.backward()
    assert all(parameter.grad is not None for parameter in network.parameters())
    assert torch.isfinite(network.eval()(torch.randn(2, 3, 8, 8))).all()


def test_a_plain_network_has_no_shortcuts():
    network = build("plain18", 3, width=8, blocks=(1, 1))
    names = [name for name, _ in network.named_parameters()]
    assert not any("shortcut" in name for name in names)
    block = network.blocks[0]
    torch.nn.init.zeros_(block.conv2.weight)
    assert block(torch.randn(2, 8, 4, 4)).abs().max() == 0
