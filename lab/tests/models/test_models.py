"""Networks: the paper's sizes, any norm by a word, and weights that fit or are refused."""

import pytest
import torch
from betternorm_lab import models
from safetensors.torch import save_file
from torch import nn

from betternorm.decay import norm_report
from betternorm.errors import UserError
from betternorm.integrations.checkpoints import read_checkpoint, state_dict_of
from betternorm.layers import BatchGroupNorm, BatchRenorm, GhostBatchNorm, GroupedBatchNorm


def norms(model):
    return [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]


def small(**options):
    return models.build("resnet18", 10, width=8, blocks=(1, 1), **options)


def test_the_papers_resnet18_has_its_filters_and_about_its_parameters():
    model = models.build("resnet18", 100)
    widths = [module.out_channels for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert set(widths) == {64, 128, 256, 512}
    assert sum(module.kernel_size == (3, 3) for module in model.modules() if isinstance(module, nn.Conv2d)) == 17
    # 17 convolutions of 3x3, three of 1x1, norms and a linear layer, counted by hand
    stages = [(64, 64), (64, 128), (128, 256), (256, 512)]
    convolutions = 3 * 64 * 9 + sum(9 * (a * b + 3 * b * b) + (a * b if a != b else 0) for a, b in stages)
    scales = 2 * (sum(a + 3 * b for a, b in stages) + 512)
    assert sum(p.numel() for p in model.parameters()) == convolutions + scales + 512 * 100 + 100
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 100)


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({"width": 16}, (2, 3, 32, 32)),
        ({"width": 8, "blocks": (1, 1, 1), "stem_stride": 2}, (2, 3, 32, 32)),
        ({"width": 8, "blocks": (1,), "in_channels": 1}, (2, 1, 8, 8)),
    ],
)
def test_it_runs_at_any_width_and_depth(options, shape):
    assert models.build("resnet18", 7, **options)(torch.randn(shape)).shape == (2, 7)


@pytest.mark.parametrize(
    ("norm", "options", "kind", "facts"),
    [
        ("batch", {}, nn.BatchNorm2d, {}),
        ("weighed", {}, GroupedBatchNorm, {"examples_per_group": None, "alpha": 0}),
        ("ghost", {"ghost_size": 4}, GhostBatchNorm, {"ghost_size": 4}),
        ("batch_group", {"num_groups": 4, "examples_per_group": 2}, BatchGroupNorm, {"num_groups": 4}),
        ("group", {"num_groups": 4}, GroupedBatchNorm, {"examples_per_group": 1, "alpha": 1}),
        ("layer", {}, GroupedBatchNorm, {"examples_per_group": 1, "alpha": 1}),
        ("instance", {}, GroupedBatchNorm, {"channels_per_group": 1, "examples_per_group": 1}),
        ("renorm", {"r_max": 2.0}, BatchRenorm, {"r_max": 2.0}),
    ],
)
def test_a_norm_is_a_word(norm, options, kind, facts):
    model = small(norm=norm, norm_options=options)
    assert len(norms(model)) == 5
    for layer in norms(model):
        assert isinstance(layer, kind)
        assert {name: getattr(layer, name) for name in facts} == facts
    if norm == "layer":
        assert all(layer.channels_per_group == layer.num_features for layer in norms(model))
    model.train()(torch.randn(4, 3, 8, 8)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_one_twin_has_paths_to_the_output_and_the_other_has_but_the_last():
    """What the experiment on decay compares (section 3.3)."""
    images = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    paths = {}
    for network in ("post_resnet", "post_plain", "resnet18", "plain18"):
        model = models.build(network, 10, width=8, blocks=(2, 2), stem_stride=2)
        paths[network] = [layer.name for layer in norm_report(model, images, quick=True).with_path]
    assert paths["post_resnet"] == ["norm", *(f"blocks.{block}.norm2" for block in range(4))]
    assert paths["post_plain"] == ["blocks.3.norm2"]
    assert paths["resnet18"] == paths["plain18"] == ["norm"]  # so these two cannot show what paths are worth


def test_a_shortcut_without_weights_keeps_channels_and_takes_means():
    block = models.build("post_resnet", 10, width=8, blocks=(1, 1)).blocks[1]
    x = torch.randn(2, 8, 6, 6)
    shortcut = block._shortcut(x)
    assert shortcut.shape == (2, 16, 3, 3)
    assert torch.allclose(shortcut[:, :8], x.unfold(2, 2, 2).unfold(3, 2, 2).mean((4, 5)))
    assert not shortcut[:, 8:].any()


def doubled(model, factor):
    for layer in norms(model):
        nn.init.constant_(layer.weight, factor)
    return model


def test_a_norm_of_ones_own():
    model = small(norm=f"{__name__}:doubled", norm_options={"factor": 2.0})
    assert all((layer.weight == 2).all() for layer in norms(model))


@pytest.mark.parametrize("name", [*models.NETWORKS, "torchvision:resnet18"])
def test_the_large_networks_are_built_converted_and_run(name):
    with torch.device("meta"):  # the shapes without the work
        model = models.build(name, 7, norm="ghost", norm_options={"ghost_size": 2}).eval()
        size = 299 if name == "inception_v3" else 331 if name == "nasnet_a_large" else 224
        assert model(torch.randn(1, 3, size, size)).shape == (1, 7)
    assert norms(model)
    assert all(isinstance(layer, GhostBatchNorm) for layer in norms(model))


@pytest.mark.parametrize("form", ["plain", "nested", "parallel", "safetensors", "converted"])
def test_weights_come_in_many_forms(tmp_path, form):
    torch.manual_seed(1)
    source = small(norm="ghost") if form == "converted" else small()
    state = source.state_dict()
    path = tmp_path / "weights.pt"
    if form == "safetensors":
        path = tmp_path / "weights.safetensors"
        save_file(state, path)
    elif form == "parallel":
        torch.save({"model_state_dict": {f"module.{name}": value for name, value in state.items()}}, path)
    elif form == "converted":
        for layer in norms(source):
            layer.alpha = 0.5
        torch.save(source.state_dict(), path)
    else:
        torch.save(state if form == "plain" else {"state_dict": state}, path)
    loaded = small(weights=path, norm="ghost")
    for name, value in state.items():
        assert torch.equal(loaded.state_dict()[name], value)
    assert all(layer.alpha == 0 for layer in norms(loaded))


def test_a_classifier_for_other_classes_is_left_new(tmp_path):
    source = models.build("resnet18", 33, width=8, blocks=(1, 1))
    torch.save(source.state_dict(), tmp_path / "w.pt")
    loaded = small(weights=tmp_path / "w.pt")
    assert loaded.head.weight.shape == (10, 16)
    assert torch.equal(loaded.stem.weight, source.stem.weight)
    assert torch.equal(loaded.norm.running_var, source.norm.running_var)


def wrong_width(folder):
    torch.save(models.build("resnet18", 10, width=4, blocks=(1, 1)).state_dict(), folder / "w.pt")


def wrong_depth(folder):
    torch.save(models.build("resnet18", 10, width=8, blocks=(1, 2)).state_dict(), folder / "w.pt")


def too_shallow(folder):
    torch.save(models.build("resnet18", 10, width=8, blocks=(1,)).state_dict(), folder / "w.pt")


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda folder: None, "there is no such file"),
        (lambda folder: (folder / "w.pt").write_bytes(b"junk"), "damaged or not a checkpoint"),
        (lambda folder: torch.save([1, 2], folder / "w.pt"), "contains a list; expected a dict of tensors"),
        (wrong_width, "of another architecture: .* with other shapes"),
        (wrong_depth, "of another architecture: .* not in the model"),
        (too_shallow, "of another architecture: .* missing"),
    ],
)
def test_weights_that_do_not_fit(tmp_path, write, words):
    write(tmp_path)
    with pytest.raises(UserError, match=words) as problem:
        small(weights=tmp_path / "w.pt")
    assert "\n" not in str(problem.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"norm": "gohst"}, "norm is 'gohst'; it must be one of batch, weighed"),
        ({"norm": "ghost", "norm_options": {"size": 4}}, "has no option 'size'"),
        ({"norm": "ghost", "norm_options": {"ghost_size": 0}}, "ghost_size=0"),
        ({"norm": "group", "norm_options": {"num_groups": 5}}, "num_groups=5"),
        ({"norm": "batch", "norm_options": {"ghost_size": 4}}, "batch norm takes none"),
        ({"norm": "nowhere:function"}, "cannot be imported"),
        ({"network": "resnet19"}, "network is 'resnet19'; it must be resnet18, "),
        ({"network": "timm:resnet19"}, "timm has no model"),
        ({"width": 0}, "width is 0"),
    ],
)
def test_networks_that_cannot_be(options, words):
    with pytest.raises(UserError, match=words):
        models.build(options.pop("network", "resnet18"), 10, **options)


def test_published_weights_are_read(external_file):
    state = state_dict_of(read_checkpoint(external_file("weights/cifar100_resnets/resnet8_cifar100.pth")))
    assert any(name.endswith("running_mean") for name in state)


@pytest.mark.parametrize(("name", "blocks"), [("cifar100_resnet8", 3), ("cifar100_resnet32", 15)])
def test_published_networks_for_cifar100_need_no_file_of_the_checkout(name, blocks):
    network = models.build(name, 100)
    assert sum(isinstance(module, nn.BatchNorm2d) for module in network.modules()) == 1 + 2 * blocks + 3  # 3 shortcuts
    assert network(torch.randn(2, 3, 32, 32)).shape == (2, 100)
