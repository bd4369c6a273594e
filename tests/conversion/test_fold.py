"""Folded models compute what they computed before; whatever cannot be folded is left alone, with the reason."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import betternorm
from betternorm import BatchGroupNorm, BatchRenorm, GhostBatchNorm
from betternorm.conversion.fold import fold
from betternorm.integrations import torchvision as torchvision_support


def settled(model: nn.Module) -> nn.Module:
    """A network whose norm layers do something."""
    torch.manual_seed(0)
    for layer in model.modules():
        if isinstance(layer, _BatchNorm):
            for tensor, low, high in (
                (layer.running_mean, -0.5, 0.5),
                (layer.running_var, 0.5, 2),
                (layer.weight, -1.5, 1.5),
                (layer.bias, -0.5, 0.5),
            ):
                if tensor is not None:
                    nn.init.uniform_(tensor, low, high)
    return model.eval()


def norms_left(model: nn.Module) -> int:
    return sum(isinstance(layer, _BatchNorm) for layer in model.modules())


def assert_folded(model: nn.Module, x: Tensor, left: int = 0) -> nn.Module:
    model = settled(model)
    with torch.no_grad():
        expected = model(x)
        folded = fold(model)
        torch.testing.assert_close(folded(x), expected, rtol=1e-5, atol=1e-5)
    assert folded is model
    assert norms_left(model) == left
    return model


CASES: dict[str, tuple[Callable[[], list[nn.Module]], tuple[int, ...]]] = {
    "convolution": (lambda: [nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)], (2, 3, 8, 8)),
    "with bias, groups and padding": (
        lambda: [nn.Conv2d(4, 6, 3, padding=1, groups=2, bias=True), nn.BatchNorm2d(6)],
        (2, 4, 8, 8),
    ),
    "without bias": (lambda: [nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6)], (2, 3, 8, 8)),
    "without affine": (lambda: [nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6, affine=False)], (2, 3, 8, 8)),
    "one dimension": (lambda: [nn.Conv1d(3, 6, 3), nn.BatchNorm1d(6)], (2, 3, 8)),
    "three dimensions": (lambda: [nn.Conv3d(3, 6, 3), nn.BatchNorm3d(6)], (2, 3, 4, 4, 4)),
    "transposed": (lambda: [nn.ConvTranspose2d(3, 6, 3, stride=2), nn.BatchNorm2d(6)], (2, 3, 5, 5)),
    "transposed with groups": (
        lambda: [nn.ConvTranspose2d(4, 6, 3, groups=2, bias=False), nn.BatchNorm2d(6)],
        (2, 4, 5, 5),
    ),
    "linear": (lambda: [nn.Linear(3, 6), nn.BatchNorm1d(6)], (5, 3)),
    "linear without bias": (lambda: [nn.Linear(3, 6, bias=False), nn.BatchNorm1d(6)], (5, 3)),
    "ghost": (lambda: [nn.Conv2d(3, 6, 3), GhostBatchNorm(6, 2)], (2, 3, 8, 8)),
    "renorm": (lambda: [nn.Conv2d(3, 6, 3), BatchRenorm(6)], (2, 3, 8, 8)),
    "synchronised": (lambda: [nn.Conv2d(3, 6, 3), nn.SyncBatchNorm(6)], (2, 3, 8, 8)),
}


@pytest.mark.parametrize("case", CASES)
def test_folded_outputs_are_equal(case: str) -> None:
    layers, shape = CASES[case]
    assert_folded(nn.Sequential(*layers(), nn.ReLU()), torch.randn(shape))


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "regnet_y_400mf"])
def test_networks_of_torchvision_fold_whole(name: str) -> None:
    torchvision_support.ready()
    models = pytest.importorskip("torchvision.models")
    assert_folded(getattr(models, name)(weights=None), torch.randn(2, 3, 64, 64))


def test_layers_with_alpha_stay_and_the_others_go() -> None:
    torchvision_support.ready()
    models = pytest.importorskip("torchvision.models")
    model = betternorm.convert(settled(models.resnet18(weights=None)), "weighed")
    betternorm.set_alpha(model, {"bn1": 0.1, "layer3.0.bn2": 0.3})
    assert_folded(model, torch.randn(2, 3, 64, 64), left=2)
    assert betternorm.get_alpha(model) == {"bn1": 0.1, "layer3.0.bn2": 0.3}


def test_timm_layers_keep_their_activation() -> None:
    torchvision_support.ready()
    timm = pytest.importorskip("timm")
    for convert in (False, True):
        model = timm.create_model("efficientnet_lite0")
        assert_folded(betternorm.convert(model, "weighed") if convert else model, torch.randn(2, 3, 64, 64))


def test_channel_groups_stay() -> None:
    with pytest.raises(ValueError, match="groups of 3 channels"):
        fold(nn.Sequential(nn.Conv2d(3, 6, 3), BatchGroupNorm(2, 6)))


class Two(nn.Module):
    """A convolution, a norm layer, and a forward pass."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.run = forward
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def twice_used(net: Any, x: Tensor) -> Tensor:
    y = net.conv(x)
    return net.norm(y) + y


UNSAFE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "output used twice": (lambda: Two(twice_used), "is used elsewhere too"),
    "activation between": (lambda: Two(lambda net, x: net.norm(net.conv(x).relu())), "follows 'relu'"),
    "layer run twice": (lambda: Two(lambda net, x: net.norm(net.conv(net.conv(x)))), "used twice"),
    "weight read": (lambda: Two(lambda net, x: net.norm(net.conv(x)) * net.conv.weight.mean()), "read elsewhere"),
    "norm first": (lambda: Two(lambda net, x: net.conv(net.norm(x))), "comes first"),
    "not used": (lambda: Two(lambda net, x: net.conv(x)), "not used at inference"),
    "depends on values": (
        lambda: Two(lambda net, x: net.norm(net.conv(x)) if x.sum() > 0 else x),
        "cannot trace the model as a whole .*pass example_input",
    ),
    "no averages": (
        lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, track_running_stats=False)),
        "no moving averages",
    ),
    "other channels": (lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(3)), "has 5 channels, and it has 3"),
    "parametrized": (
        lambda: nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 1)), nn.BatchNorm2d(4)),
        "parametrized",
    ),
}


@pytest.mark.parametrize("case", UNSAFE)
def test_what_cannot_be_shown_is_an_error_and_nothing_is_changed(case: str) -> None:
    make, words = UNSAFE[case]
    model = make().train()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=f"nothing to fold.*({words})"):
        fold(model)
    assert model.training
    assert all(module.training for module in model.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_hook_keeps_its_layer() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
    model[0].register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="has hooks"):
        fold(model)


def test_shared_layers_stay() -> None:
    conv = nn.Conv2d(4, 4, 1)
    with pytest.raises(ValueError, match=r"used twice|two places"):
        fold(nn.Sequential(conv, nn.BatchNorm2d(4), conv, nn.BatchNorm2d(4)))


def test_a_model_without_batch_norm_is_refused() -> None:
    with pytest.raises(ValueError, match="no batch norm layer"):
        fold(nn.Sequential(nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4)))


def data_dependent(net: Any, x: Tensor) -> Tensor:
    return net.block(net.norm(net.conv(x)).relu()) if x.sum() > -1e9 else x


def test_a_model_that_cannot_be_traced_is_folded_with_an_example() -> None:
    block = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
    model = settled(Two(data_dependent, block=block))
    x = torch.rand(2, 4, 3, 3)
    expected = model(x)
    with pytest.raises(ValueError, match=r"cannot trace the model as a whole .*; pass example_input"):
        fold(model)
    for example in (x, (x,), {"x": x}):
        folded = fold(copy.deepcopy(model), example)
        assert norms_left(folded) == 0
        torch.testing.assert_close(folded(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_folding_with_an_example_is_folding_without_one(case: str) -> None:
    layers, shape = CASES[case]
    model = settled(nn.Sequential(*layers(), nn.ReLU()))
    x = torch.randn(shape)
    traced, called = fold(copy.deepcopy(model)), fold(copy.deepcopy(model), x)
    assert norms_left(called) == 0
    assert torch.equal(traced(x), called(x))


def collected(net: Any, x: Tensor) -> list[Tensor]:
    outputs = []
    for layer in net.block:
        x = layer(x)
        outputs.append(x)
    return outputs


def in_other_ways(case: str) -> tuple[nn.Module, str]:
    """A model whose block is a convolution and a norm layer, used in a way that folding would change."""
    block = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
    uses: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
        "parts one by one": (collected, "used elsewhere"),
        "an activation between": (
            lambda net, x: net.block[1](net.block[0](x).relu()),
            "does not get the output of a convolution|follows",
        ),
        "an in-place activation between": (
            lambda net, x: net.block[1](net.block[0](x).relu_()),
            "used elsewhere|follow",
        ),
        "the weight in a function": (
            lambda net, x: net.block(x) + F.conv2d(x, net.block[0].weight),
            "parameters, or those of the layer before it, are read elsewhere",
        ),
        "the statistics in a function": (
            lambda net, x: net.block(x) + net.block[1].running_mean.view(1, -1, 1, 1),
            "parameters, or those of the layer before it, are read elsewhere",
        ),
        "the convolution again": (lambda net, x: net.block(x) + net.block[0](x), "used twice|used elsewhere"),
        "the output kept": (lambda net, x: net.block[1](net.kept.setdefault("x", net.block[0](x))), "used elsewhere"),
    }
    run, reason = uses[case]
    model = Two(lambda net, x: run(net, x) if float(x.sum()) > -1e9 else x, block=block)
    del model.conv, model.norm
    model.kept = {}
    return settled(model), reason


@pytest.mark.parametrize(
    "case",
    [
        "parts one by one",
        "an activation between",
        "an in-place activation between",
        "the weight in a function",
        "the statistics in a function",
        "the convolution again",
        "the output kept",
    ],
)
def test_other_uses_are_seen_in_one_call(case: str) -> None:
    model, reason = in_other_ways(case)
    x = torch.randn(2, 4, 3, 3)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"cannot trace the model as a whole .*; pass example_input"):
        fold(model)
    with pytest.raises(ValueError, match=f"nothing to fold.*({reason})"):
        fold(model, x)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class Switched(nn.Module):
    """Other branches of forward, other methods, and flags that change what a model computes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.normalize = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return self.norm(x) if self.normalize else x


class WithFeatures(Two):
    def forward(self, x: Tensor, feats: bool = False) -> Tensor:
        y = self.conv(x)
        return y if feats else self.norm(y)


class WithMethod(Two):
    def features(self, x: Tensor) -> Tensor:
        return self.conv(x)

    def describe(self) -> int:
        return self.conv.out_channels

    def head(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


@pytest.mark.parametrize("with_example", [False, True])
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Switched, "Switched.normalize=True decides whether it follows the layer before it"),
        (lambda: WithMethod(twice_used), "WithMethod.features, which forward does not call, uses the layer before it"),
    ],
)
def test_flags_and_other_methods_are_respected(make: Any, reason: str, with_example: bool) -> None:
    model = settled(make())
    with pytest.raises(ValueError, match=reason):
        fold(model, torch.randn(2, 4, 3, 3) if with_example else None)
    assert getattr(model, "normalize", True)


def test_a_flag_that_changes_something_else_is_no_obstacle() -> None:
    model = Two(lambda net, x: net.norm(net.conv(x)) * (2 if net.double else 1))
    model.double = True
    assert_folded(model, torch.randn(2, 4, 3, 3))
    assert model.double


def test_a_linear_layer_before_channels_in_another_dimension_is_seen_in_one_call() -> None:
    model = settled(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Conv1d(4, 3, 1), nn.BatchNorm1d(3)))
    x = torch.randn(2, 4, 6)
    expected = model(x)
    with pytest.warns(UserWarning, match="layer '1'.*are not its channels"):
        fold(model, x)
    assert norms_left(model) == 1
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)


def test_a_model_that_fails_after_folding_is_restored() -> None:
    model = settled(Two(lambda net, x: net.norm(net.conv(x))))
    x = torch.randn(2, 4, 3, 3)
    expected = model(x)

    def need_norm(module: Any, *_: Any) -> None:
        assert isinstance(module.norm, _BatchNorm), "the norm layer is gone"

    model.register_forward_hook(need_norm)
    with pytest.raises(ValueError, match="the norm layer is gone"):
        fold(model, x)
    assert norms_left(model) == 1
    assert torch.equal(model(x), expected)


class WithKeywords(Two):
    def forward(self, x: Tensor, **options: Any) -> Tensor:
        y = self.conv(x)
        return y if options.get("feats") else self.norm(y)


class WithMoreInputs(Two):
    def forward(self, *inputs: Any) -> Tensor:
        y = self.conv(inputs[0])
        return y if len(inputs) > 1 else self.norm(y)


class WithRequiredFlag(Two):
    def forward(self, x: Tensor, feats: bool) -> Tensor:
        y = self.conv(x)
        return y if feats else self.norm(y)


class WithOthers(Two):
    def forward(self, x: Tensor, others: Any = ()) -> Tensor:
        return self.norm(self.conv(torch.cat([x, *others])))


@pytest.mark.parametrize(
    ("kind", "example_input", "args", "kwargs", "message"),
    [
        (WithKeywords, (), (), {"feats": True}, "feats=True: this model was folded with no feats"),
        (WithMoreInputs, (), (True,), {}, "argument 2=True: this model was folded with no argument 2"),
        (WithRequiredFlag, (False,), (True,), {}, "feats=True: this model was folded with feats=False"),
        (WithRequiredFlag, (False,), (), {"feats": True}, "feats=True: this model was folded with feats=False"),
    ],
)
def test_arguments_of_every_kind_have_to_stay_as_in_the_example(
    kind: type[nn.Module], example_input: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any], message: str
) -> None:
    model, x = settled(kind(twice_used)), torch.randn(2, 4, 3, 3)
    expected = model(x, *example_input)
    fold(model, (x, *example_input))
    torch.testing.assert_close(model(x, *example_input), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=message):
        model(x, *args, **kwargs)


def test_optional_arguments_with_tensors_may_have_other_values() -> None:
    model, x = settled(WithOthers(twice_used)), torch.randn(2, 4, 3, 3)
    expected = model(x, [2 * x])
    fold(model, (x, [x]))
    torch.testing.assert_close(model(x, [2 * x]), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="others="):
        model(x)


def test_optional_arguments_have_to_stay_as_in_the_example() -> None:
    model = settled(WithFeatures(twice_used))
    x = torch.randn(2, 4, 3, 3)
    expected, features = model(x), model(x, feats=True)
    with pytest.raises(ValueError, match=r"forward has optional arguments \(feats\); pass example_input"):
        fold(model)
    folded = fold(copy.deepcopy(model), x)
    torch.testing.assert_close(folded(x), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(folded(x, False), expected, rtol=1e-5, atol=1e-5)
    for call in (lambda net: net(x, True), lambda net: net(x, feats=True)):
        with pytest.raises(ValueError, match="feats=True: this model was folded with feats=False"):
            call(folded)
        with pytest.raises(ValueError, match="feats=True"):
            call(copy.deepcopy(folded))
    program = torch.export.export(folded, (x,)).module()
    torch.testing.assert_close(program(x), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="not used at inference"):
        fold(model, {"x": x, "feats": True})
    assert torch.equal(model(x, feats=True), features)


@pytest.mark.parametrize("where", ["model", "norm", "conv"])
def test_a_forward_that_was_replaced_on_an_instance_is_respected(where: str) -> None:
    model = settled(Two(lambda net, x: net.norm(net.conv(x))))
    layer = model if where == "model" else getattr(model, where)
    original = layer.forward
    layer.forward = (lambda x: model.conv(x)) if where == "model" else lambda x: original(x) * 2
    x = torch.randn(2, 4, 3, 3)
    expected = model(x)
    for example in (None, x):
        with pytest.raises(ValueError, match=r"replaced on the instance|not used at|used elsewhere|read else"):
            fold(model, example)
    assert torch.equal(model(x), expected)


def test_a_subclass_that_computes_something_else_is_left_alone() -> None:
    class Standardized(nn.Conv2d):
        def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return super()._conv_forward(input, weight - weight.mean(), bias)

    with pytest.raises(ValueError, match="class Standardized overrides _conv_forward"):
        fold(nn.Sequential(Standardized(4, 4, 1), nn.BatchNorm2d(4)))


def test_a_model_whose_outputs_are_random_is_restored() -> None:
    model = settled(Two(lambda net, x: net.norm(net.conv(x)) + count.pop()))
    count = [9.0, 3.0, 0.0, 0.0]
    state, forward = copy.deepcopy(model.state_dict()), type(model.norm)
    x = torch.randn(2, 4, 3, 3)
    with pytest.raises(ValueError, match=r"outputs for example_input differ by .* restored"):
        fold(model.train(), x)
    assert model.training
    assert type(model.norm) is forward
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_an_example_that_the_model_does_not_accept_is_named() -> None:
    with pytest.raises(ValueError, match="does not accept example_input in evaluation mode: RuntimeError"):
        fold(nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)), torch.randn(2, 3, 5, 5))


def test_layers_that_are_also_in_a_plain_list_are_folded_once() -> None:
    model = Two(lambda net, x: net.layers[1](net.layers[0](x)))
    model.layers = [model.conv, model.norm]
    assert_folded(model, torch.randn(2, 4, 3, 3))
    assert model.layers[1] is model.norm


def test_a_folded_model_is_copied_and_saved(tmp_path: Any) -> None:
    model = fold(settled(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Conv1d(4, 2, 1), nn.BatchNorm1d(2))[:2]))
    torch.save(model, tmp_path / "folded.pt")
    x = torch.randn(5, 3)
    for other in (copy.deepcopy(model), torch.load(tmp_path / "folded.pt", weights_only=False)):
        assert torch.equal(other(x), model(x))


def test_all_layers_with_alpha_are_answered_with_what_to_do() -> None:
    model = betternorm.convert(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)), "weighed")
    betternorm.set_alpha(model, 0.1)
    with pytest.raises(ValueError, match=r"all 1 batch norm layers have alpha > 0.*export the model directly, or tune"):
        fold(model)


def test_what_is_fused_after_folding_is_an_error_that_explains_why() -> None:
    model = fold(nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)))
    with pytest.raises(AttributeError, match=r"betternorm.fold has folded this norm layer"):
        nn.utils.fusion.fuse_conv_bn_eval(model[0], model[1])


def test_the_report_says_where_each_layer_went(capsys: pytest.CaptureFixture[str]) -> None:
    model = betternorm.convert(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.BatchNorm2d(4)), "weighed")
    betternorm.set_alpha(model, {"2": 0.25})
    fold(model, verbose=True)
    report = capsys.readouterr().out
    assert "in 0" in report
    assert "it has alpha 0.25" in report


def test_a_norm_folded_into_a_linear_layer_refuses_sequences() -> None:
    """BatchNorm1d of (N, L, C) normalises L, which no linear layer can take over."""
    model = fold(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    with pytest.raises(ValueError, match=r"shape \(2, 4, 4\).*without betternorm.fold"):
        model(torch.randn(2, 4, 4))


def test_a_folded_network_is_exported() -> None:
    model = betternorm.convert(
        settled(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))), "weighed"
    )
    betternorm.set_alpha(model, {"3": 0.25})
    x = torch.randn(2, 3, 5, 5)
    expected = model(x)
    program = torch.export.export(fold(model), (x,)).module()
    torch.testing.assert_close(program(x), expected, rtol=1e-5, atol=1e-5)
