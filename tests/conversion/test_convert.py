"""Conversion changes the class of a layer: everything that refers to the layer stays valid, and it can be undone."""

import copy
import functools
import pickle

import pytest
import torch
from torch import nn

from betternorm import (
    BatchGroupNorm,
    BatchRenorm,
    GhostBatchNorm,
    GroupedBatchNorm,
    changes,
    convert,
    get_alpha,
    revert,
    set_alpha,
    upgrade,
)


def small_network(norm=nn.BatchNorm2d) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), norm(8), nn.ReLU(), nn.Sequential(nn.Conv2d(8, 12, 3), norm(12), nn.ReLU(inplace=True))
    )
    return with_history(model)


def with_history(model: nn.Module) -> nn.Module:
    """Moving averages and parameters as after some training."""
    for module in model.modules():
        if getattr(module, "running_mean", None) is not None:
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
        if isinstance(module, (nn.modules.batchnorm._BatchNorm, nn.GroupNorm)) and module.weight is not None:
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias)
    return model


def images(count: int = 4) -> torch.Tensor:
    return torch.randn(count, 3, 9, 9, generator=torch.Generator().manual_seed(1))


KINDS = {
    "weighed": ({}, GroupedBatchNorm),
    "ghost": ({"ghost_size": 2}, GhostBatchNorm),
    "batch_group": ({"num_groups": 4}, BatchGroupNorm),
    "group": ({"num_groups": 4}, GroupedBatchNorm),
    "renorm": ({"r_max": 2.0}, BatchRenorm),
}
every_kind = pytest.mark.parametrize(("to", "options", "kind"), [(to, *rest) for to, rest in KINDS.items()])


@every_kind
def test_every_norm_layer_is_swapped_and_swapped_back(to, options, kind):
    model = small_network()
    before = model.eval()(images())
    assert convert(model, to, **options) is model
    assert [type(model[1]), type(model[3][1])] == [kind, kind]
    assert revert(model) is model
    assert [type(model[1]), type(model[3][1])] == [nn.BatchNorm2d, nn.BatchNorm2d]
    assert torch.equal(model(images()), before)


@every_kind
def test_conversion_keeps_parameters_buffers_mode_dtype_and_keys(to, options, kind):
    model = small_network().double().eval()
    model[3][1].train()
    parameters = [id(p) for p in model.parameters()]
    state = copy.deepcopy(model.state_dict())
    convert(model, to, **options)
    assert [id(p) for p in model.parameters()] == parameters
    assert [model[1].training, model[3][1].training] == [False, True]
    kept = {key: value for key, value in model.state_dict().items() if not key.endswith(".alpha")}
    assert kept.keys() == state.keys()
    for key, value in kept.items():
        assert value.dtype == state[key].dtype
        assert torch.equal(value, state[key])


@every_kind
def test_an_optimizer_built_before_trains_the_converted_model(to, options, kind):
    model = small_network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    convert(model, to, **options)
    before = model[1].weight.detach().clone()
    model.train()(images()).square().mean().backward()
    optimizer.step()
    assert not torch.equal(model[1].weight, before)
    assert int(model[1].num_batches_tracked) == 1


def test_weighed_at_alpha_0_is_the_original_to_the_bit():
    model = small_network().eval()
    before = model(images())
    assert torch.equal(convert(model, "weighed")(images()), before)


def test_weighed_trains_as_the_original():
    model = small_network()
    other = convert(copy.deepcopy(model), "weighed")
    torch.testing.assert_close(other.train()(images()), model.train()(images()), atol=1e-5, rtol=1e-5)


def test_hooks_survive_and_their_handles_still_remove_them():
    model = small_network()
    seen = []
    handle = model[1].register_forward_hook(lambda module, *_: seen.append(type(module)))
    convert(model, "ghost")(images())
    assert seen == [GhostBatchNorm]
    handle.remove()
    model(images())
    assert len(seen) == 1


def test_what_training_changes_is_there_after_reverting():
    model = convert(small_network(), "ghost", ghost_size=2).train()
    model(images())
    mean, var = model[1].running_mean.clone(), model[1].running_var.clone()
    model.eval()
    revert(model)
    assert torch.equal(model[1].running_mean, mean)
    assert torch.equal(model[1].running_var, var)
    assert int(model[1].num_batches_tracked) == 1
    assert not model[1].training


def test_a_model_moved_after_conversion_reverts_to_where_it_is():
    model = convert(small_network(), "weighed").double()
    revert(model)
    assert {t.dtype for t in model.state_dict().values()} == {torch.float64, torch.int64}
    assert model(images().double()).dtype == torch.float64


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_of_a_converted_model_are_whole_and_independent(duplicate):
    model = convert(small_network(), "weighed").eval()
    model[1].alpha = 0.3
    before = model(images())
    other = duplicate(model)
    assert torch.equal(other(images()), before)
    revert(other)
    assert type(other[1]) is nn.BatchNorm2d
    assert torch.equal(model(images()), before)


def test_converting_again_starts_from_the_original():
    model = convert(convert(small_network(), "ghost", ghost_size=2), "batch_group", num_groups=4)
    assert type(model[1]) is BatchGroupNorm
    assert type(revert(model)[1]) is nn.BatchNorm2d


def test_weighed_leaves_layers_that_have_an_alpha_as_they_are(recwarn):
    model = convert(small_network(), "ghost")
    convert(model, "weighed")
    assert type(model[1]) is GhostBatchNorm
    assert not recwarn


def test_a_conversion_that_changes_training_sets_alpha_back():
    model = convert(small_network(), "weighed")
    model[1].alpha = 0.2
    assert convert(model, "ghost")[1].alpha == 0
    assert convert(model, "group", num_groups=4)[1].alpha == 1
    assert convert(model, "ghost")[1].alpha == 0


def test_a_layer_used_in_two_places_stays_one_layer():
    norm = nn.BatchNorm2d(8)
    model = nn.ModuleDict({"a": norm, "b": nn.Sequential(norm)})
    convert(model, "ghost")
    assert type(model["a"]) is GhostBatchNorm
    assert model["a"] is model["b"][0]


@pytest.mark.parametrize("module", [nn.BatchNorm1d(6), nn.BatchNorm2d(6), nn.BatchNorm3d(6), nn.SyncBatchNorm(6)])
def test_a_model_that_is_itself_a_norm_layer_is_returned_converted(module):
    layer = convert(module, "ghost")
    assert type(layer) is GhostBatchNorm
    assert layer.weight is module.weight
    assert revert(layer) is module


def test_synchronised_layers_stay_synchronised():
    assert convert(nn.SyncBatchNorm(6), "ghost").process_group == "world"
    assert convert(nn.BatchNorm2d(6), "ghost").process_group is None
    assert convert(nn.BatchNorm2d(6), "ghost", process_group="world").process_group == "world"


class TestWhere:
    @pytest.mark.parametrize(
        ("where", "converted"),
        [
            ("1", [True, False]),
            ("3.*", [False, True]),
            ("!1", [False, True]),
            (["*", "!3.*"], [True, False]),
            (lambda name, module: module.num_features == 12, [False, True]),
        ],
    )
    def test_it_selects(self, where, converted):
        model = convert(small_network(), "ghost", where=where)
        assert [isinstance(layer, GhostBatchNorm) for layer in (model[1], model[3][1])] == converted

    def test_selecting_nothing_is_a_warning(self):
        with pytest.warns(UserWarning, match=r"nothing to convert to 'ghost' among .*'9\.\*'"):
            convert(small_network(), "ghost", where="9.*")


class TestGroupNorm:
    def test_weighed_is_the_same_layer_in_both_modes(self):
        model = with_history(nn.Sequential(nn.GroupNorm(4, 12), nn.InstanceNorm2d(12)))
        x = torch.randn(3, 12, 5, 5)
        before = model(x)
        convert(model, "weighed")
        assert [layer.alpha for layer in model] == [1, 1]
        torch.testing.assert_close(model.train()(x), before, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(model.eval()(x), before, atol=1e-6, rtol=1e-6)

    def test_its_checkpoint_loads_into_the_converted_model_but_for_the_averages(self):
        state = with_history(nn.GroupNorm(4, 12)).state_dict()
        layer = convert(nn.GroupNorm(4, 12), "weighed")
        result = layer.load_state_dict(state, strict=False)
        assert set(result.missing_keys) == {"running_mean", "running_var"}
        assert layer.alpha == 1
        assert torch.equal(layer.weight, state["weight"])

    def test_batch_group_keeps_its_groups(self):
        layer = convert(nn.GroupNorm(3, 12), "batch_group")
        assert (layer.num_groups, layer.examples_per_group) == (3, 2)
        assert convert(nn.GroupNorm(3, 12), "batch_group", num_groups=6).num_groups == 6

    def test_averages_are_gone_after_reverting(self):
        model = nn.Sequential(nn.GroupNorm(4, 12), nn.InstanceNorm2d(12))
        keys = set(model.state_dict())
        revert(convert(model, "weighed"))
        assert set(model.state_dict()) == keys
        assert model[1].running_mean is None

    def test_instance_norm_with_averages_uses_them_at_inference(self):
        norm = with_history(nn.InstanceNorm2d(6, track_running_stats=True)).eval()
        x = torch.randn(3, 6, 5, 5)
        before = norm(x)
        torch.testing.assert_close(convert(norm, "weighed")(x), before)

    def test_ghost_leaves_it_alone(self):
        with pytest.warns(UserWarning, match="nothing to convert"):
            assert type(convert(nn.Sequential(nn.GroupNorm(4, 12)), "ghost")[0]) is nn.GroupNorm


class TestOtherLibraries:
    @pytest.fixture(autouse=True)
    def _libraries(self):
        from betternorm.integrations import torchvision

        torchvision.ready()

    @pytest.mark.parametrize("to", ["weighed", "ghost", "renorm"])
    def test_timm_keeps_its_activation_and_dropout(self, to):
        timm_layers = pytest.importorskip("timm.layers")
        norm = with_history(timm_layers.BatchNormAct2d(6, act_layer=nn.SiLU)).eval()
        x = torch.randn(3, 6, 5, 5)
        before = norm(x)
        layer = convert(norm, to)
        assert torch.equal(layer(x), before)
        assert (layer.train()(x) >= -0.3).all()  # the least value of SiLU is -0.278
        assert torch.equal(revert(layer).eval()(x.clone()).sign(), norm.eval()(x).sign())

    def test_timm_frozen_batch_norm_keeps_its_activation(self):
        timm_layers = pytest.importorskip("timm.layers")
        norm = with_history(timm_layers.FrozenBatchNormAct2d(6))
        x = torch.randn(3, 6, 5, 5)
        before = norm(x)
        assert (before >= 0).all()
        torch.testing.assert_close(convert(norm, "weighed")(x), before, atol=1e-5, rtol=1e-5)

    def test_timm_group_norm_with_activation(self):
        timm_layers = pytest.importorskip("timm.layers")
        norm = with_history(timm_layers.GroupNormAct(6, num_groups=3))
        x = torch.randn(3, 6, 5, 5)
        before = norm(x)
        torch.testing.assert_close(convert(norm, "weighed").eval()(x), before, atol=1e-6, rtol=1e-6)

    def test_frozen_batch_norm_stays_frozen(self):
        ops = pytest.importorskip("torchvision.ops")
        norm = with_history(ops.FrozenBatchNorm2d(6))
        x = torch.randn(3, 6, 5, 5)
        before, keys = norm(x), list(norm.state_dict())
        layer = convert(norm, "weighed")
        torch.testing.assert_close(layer.train()(x), before, atol=1e-5, rtol=1e-5)
        assert list(layer.state_dict()) == keys
        assert not list(layer.parameters())
        layer.load_state_dict(norm.state_dict())
        layer.load_state_dict(nn.BatchNorm2d(6).state_dict())
        layer.alpha = 0.5
        assert torch.isfinite(layer(x)).all()
        assert list(revert(layer).state_dict()) == keys

    def test_frozen_batch_norm_cannot_become_another_kind(self):
        ops = pytest.importorskip("torchvision.ops")
        with pytest.warns(UserWarning, match="frozen"):
            convert(nn.Sequential(ops.FrozenBatchNorm2d(6)), "ghost")


class OwnForward(nn.BatchNorm2d):
    def forward(self, input):
        return 2 * super().forward(input)


class OwnCall(nn.BatchNorm2d):
    def __call__(self, input):
        return 2 * super().__call__(input)


class AlwaysEvaluation(nn.BatchNorm2d):
    def train(self, mode=True):
        return super().train(False)


class AnyRank(nn.BatchNorm2d):
    """What a subclass may change without being rejected."""

    def __init__(self, num_features):
        super().__init__(num_features)
        self.note = "mine"

    def _check_input_dim(self, input):
        pass

    def extra_repr(self):
        return "any rank"


def patched_forward():
    layer = nn.BatchNorm2d(4)
    layer.forward = lambda input: input
    return layer


class TestRefusals:
    @pytest.mark.parametrize(
        ("module", "reason"),
        [
            (nn.BatchNorm2d(4, track_running_stats=False), "no moving averages"),
            (OwnForward(4), "its class OwnForward overrides forward"),
            (OwnCall(4), "its class OwnCall overrides __call__"),
            (AlwaysEvaluation(4), "its class AlwaysEvaluation overrides train"),
            (patched_forward(), "its forward was replaced on the instance"),
            (nn.utils.parametrizations.weight_norm(nn.BatchNorm2d(4), dim=None), "parametrized"),
        ],
    )
    def test_layers_it_does_not_understand_are_left_with_the_reason(self, module, reason):
        model = nn.Sequential(module)
        with pytest.warns(UserWarning, match=f"layer '0' .*{reason}"):
            convert(model, "ghost")
        assert model[0] is module

    def test_nothing_to_convert_or_revert_is_a_warning(self):
        with pytest.warns(UserWarning, match="nothing to convert to 'ghost'"):
            convert(nn.Linear(2, 2), "ghost")
        with pytest.warns(UserWarning, match="nothing to revert"):
            revert(nn.Linear(2, 2))

    @pytest.mark.parametrize(
        ("to", "options", "message"),
        [
            ("gohst", {}, "to='gohst' is not a kind of layer; known are 'weighed', 'ghost'"),
            ("ghost", {"size": 4}, "no option 'size'; it takes ghost_size"),
            ("weighed", {"ghost_size": 4}, "no option 'ghost_size'; it takes no options"),
            ("ghost", {"ghost_size": 0}, "layer '1': ghost_size=0 must be 1 or more"),
            ("ghost", {"ghost_size": 2.5}, "ghost_size=2.5 must be a whole number"),
            (
                "group",
                {"num_groups": 8},
                "layer '3.1': num_groups=8 does not divide the 12 channels; 1, 2, 3",
            ),
            ("batch_group", {"num_groups": 4, "examples_per_group": 0}, "examples_per_group=0 must be 1 or more"),
            ("renorm", {"r_max": 0.5}, "r_max=0.5 must be 1 or more"),
        ],
    )
    def test_bad_arguments_are_named_and_nothing_is_changed(self, to, options, message):
        model = small_network()
        state = list(model.state_dict())
        with pytest.raises((ValueError, TypeError)) as caught:
            convert(model, to, **options)
        assert message in str(caught.value)
        assert not changes(model)
        assert list(model.state_dict()) == state
        assert all("alpha" not in module._buffers for module in model.modules())

    def test_more_groups_than_channels_is_one_channel_a_group(self):
        assert convert(nn.BatchNorm2d(12), "group", num_groups=32).channels_per_group == 1

    def test_lazy_layers_ask_for_a_batch_first(self):
        model = nn.Sequential(nn.LazyBatchNorm2d())
        with pytest.raises(ValueError, match=r"layer '0' is a LazyBatchNorm2d .* run one batch"):
            convert(model, "ghost")
        model(torch.randn(2, 4, 3, 3))
        assert type(convert(model, "ghost")[0]) is GhostBatchNorm

    @pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
    def test_scripted_models_are_refused(self):
        traced = torch.jit.trace(small_network().eval(), images())
        with pytest.raises(ValueError, match="TorchScript"):
            convert(traced, "ghost")

    def test_a_model_wrapped_for_distributed_training_is_refused(self, tmp_path):
        torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
        try:
            wrapped = nn.parallel.DistributedDataParallel(small_network())
            for surgery in (lambda: convert(wrapped, "ghost"), lambda: revert(wrapped)):
                with pytest.raises(ValueError, match=r"wrapped in DistributedDataParallel.*change the model first"):
                    surgery()
        finally:
            torch.distributed.destroy_process_group()


class TestWhatAConvertedLayerKeeps:
    @pytest.mark.parametrize(
        ("norm", "wrong"),
        [
            (nn.BatchNorm1d(4), (4, 4, 4, 4)),
            (nn.BatchNorm2d(4), (4, 4, 4)),
            (nn.BatchNorm3d(4), (4, 4, 4, 4)),
            (nn.InstanceNorm2d(4), (4, 4)),
        ],
    )
    def test_inputs_that_the_original_refuses(self, norm, wrong):
        x = torch.randn(wrong)
        with pytest.raises(ValueError, match=f"{len(wrong)}D input"):
            norm(x)
        with pytest.raises(ValueError, match=f"got {len(wrong)}D input"):
            convert(norm, "weighed")(x)

    @pytest.mark.parametrize(
        ("norm", "shape"),
        [(nn.InstanceNorm1d(4), (4, 4)), (nn.InstanceNorm2d(4), (4, 4, 5)), (nn.InstanceNorm3d(4), (4, 4, 5, 3))],
    )
    def test_an_example_without_a_batch(self, norm, shape):
        x = torch.randn(shape)
        before = norm(x)
        layer = convert(norm, "weighed")
        for mode in (True, False):
            torch.testing.assert_close(layer.train(mode)(x), before, atol=1e-5, rtol=1e-5)

    def test_frozen_averages_stay_frozen(self):
        norm = nn.BatchNorm2d(4)
        norm.track_running_stats = False
        layer = convert(norm, "ghost", ghost_size=2)
        layer(torch.randn(4, 4, 3, 3))
        assert torch.equal(layer.running_mean, torch.zeros(4))
        layer.track_running_stats = True
        assert revert(layer).track_running_stats

    def test_children_that_nobody_asked_for_are_not_called(self):
        layer = convert(nn.BatchNorm2d(4), "ghost", ghost_size=2)
        layer.probe = nn.Linear(1, 1)
        assert layer(torch.randn(4, 4, 3, 3)).shape == (4, 4, 3, 3)

    def test_buffers_that_others_add_survive_reverting(self):
        layer = convert(nn.GroupNorm(2, 4), "weighed")
        layer.register_buffer("mask", torch.ones(4))
        layer.register_buffer("hidden", torch.ones(4), persistent=False)
        origin = revert(layer)
        assert list(origin.state_dict()) == ["weight", "bias", "mask"]
        assert torch.equal(origin.hidden, torch.ones(4))


class TestWeightsOfBatchNorm:
    """A network that trains on each example by itself stands at alpha 1, whatever is loaded into it."""

    @pytest.mark.parametrize(
        "prepare", [lambda m: convert(m, "group", num_groups=4), lambda m: upgrade(m, 1, verbose=False)]
    )
    def test_group_norm_keeps_its_alpha(self, prepare):
        model = prepare(small_network())
        model.load_state_dict(small_network().state_dict())
        assert [model[1].alpha, model[3][1].alpha] == [1, 1]

    def test_the_others_have_none(self):
        model = convert(small_network(), "ghost")
        set_alpha(model, 0.3)
        model.load_state_dict(small_network().state_dict())
        assert get_alpha(model) == 0

    @pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
    @pytest.mark.parametrize("to", ["group", "ghost"])
    def test_a_checkpoint_of_the_same_network_brings_its_own(self, to, alpha):
        model, other = (convert(small_network(), to) for _ in range(2))
        set_alpha(model, alpha)
        set_alpha(other, 0.7)
        other.load_state_dict(model.state_dict())
        assert get_alpha(other) == alpha


def test_the_table_of_changes_names_every_layer(capsys):
    model = convert(small_network(), "ghost", where="!1", verbose=True)
    printed = capsys.readouterr().out
    assert printed.strip() == str(changes(model))
    assert [change.name for change in changes(model)] == ["3.1"]
    assert "BatchNorm2d(12" in printed
    assert "GhostBatchNorm(12, ghost_size=16" in printed


# ---- references that torch does not know of ----


class KeepsItsLayers(nn.Module):
    """A widely copied pattern: norm layers are registered under names, and used through a list, a dict or a closure."""

    def __init__(self, use):
        super().__init__()
        self.norms, self.by_name = [], {}
        for i in range(2):
            layer = with_history(nn.BatchNorm2d(3))
            setattr(self, f"bn{i}", layer)
            self.norms.append(layer)
            self.by_name[i] = layer
        first, second = self.norms
        self.chain = lambda x: second(first(x))
        self.use = use

    def forward(self, x):
        return self.use(self, x)


USES = {
    "a list": lambda net, x: functools.reduce(lambda y, layer: layer(y), net.norms, x),
    "a dict": lambda net, x: net.by_name[1](net.by_name[0](x)),
    "a closure": lambda net, x: net.chain(x),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_layers_used_through_plain_containers_are_converted_too(use):
    torch.manual_seed(0)
    model = KeepsItsLayers(use).train()
    expected = GroupedBatchNorm(3), GroupedBatchNorm(3)
    for layer, name in zip(expected, ("bn0", "bn1"), strict=True):
        layer.load_state_dict(getattr(model, name).state_dict())
        layer.eval().alpha = 0.4
    convert(model, "weighed").eval()
    set_alpha(model, 0.4)
    before = copy.deepcopy(model.state_dict())
    assert torch.equal(model(images()), expected[1](expected[0](images())))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items()), "evaluation moved them"
    assert revert(model).norms[0] is model.bn0
    assert type(model.bn0) is nn.BatchNorm2d


def stored(place):
    """A network that stores the bound method ``forward`` of its norm layer."""
    model = small_network()
    method = model[1].forward
    model.method = {
        "an attribute": method,
        "a list": [method],
        "a dict of tuples": {"a": (1, method)},
        "a closure": lambda x: method(x),
        "a default": lambda x, run=method: run(x),
        "a partial": functools.partial(method),
    }[place]
    return model


@pytest.mark.parametrize("place", ["an attribute", "a list", "a dict of tuples", "a closure", "a default", "a partial"])
def test_a_stored_bound_method_is_an_error_and_nothing_is_changed(place):
    model = stored(place)
    with pytest.raises(ValueError, match="'method' stores the bound method 'forward' of a BatchNorm2d"):
        convert(model, "weighed")
    assert [type(model[1]), type(model[3][1])] == [nn.BatchNorm2d, nn.BatchNorm2d]
    convert(model, "weighed", where="!1")
    model.method = model[3][1].forward
    with pytest.raises(ValueError, match="'method' stores the bound method 'forward' of a GroupedBatchNorm"):
        revert(model)


def test_a_stored_bound_method_that_all_modules_share_is_no_obstacle():
    model = small_network()
    model.method = model[1].__call__
    convert(model, "weighed").eval()
    set_alpha(model, 0.5)
    x = torch.randn(2, 8, 4, 4)
    assert torch.equal(model.method(x), model[1](x))


def test_norm_layers_that_are_not_registered_are_named_in_a_warning():
    model = small_network()
    model.extra = [nn.Sequential(nn.BatchNorm2d(4))]
    with pytest.warns(UserWarning, match=r"not converted: norm layers stored in 'extra', which model.modules\(\)"):
        convert(model, "weighed")
    assert isinstance(model[1], GroupedBatchNorm)


def test_a_model_compiled_before_conversion_uses_the_converted_layers():
    torch.compiler.reset()
    model = small_network().eval()
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        before = compiled(images())
        set_alpha(convert(model, "weighed"), 0.5)
        torch.testing.assert_close(compiled(images()), model(images()), rtol=1e-4, atol=1e-4)
        assert not torch.allclose(model(images()), before, atol=1e-2)
        torch.testing.assert_close(revert(compiled)(images()), before, rtol=1e-4, atol=1e-4)


@every_kind
def test_reverting_restores_the_class_and_all_attributes(to, options, kind):
    for layer in (nn.BatchNorm2d(12, momentum=None), nn.SyncBatchNorm(12), AnyRank(12), nn.GroupNorm(3, 12)):
        if isinstance(layer, nn.GroupNorm) and to not in ("weighed", "batch_group"):
            continue
        before, original = dict(layer.__dict__), type(layer)
        state = {key: value.clone() for key, value in layer.state_dict().items()}
        convert(convert(layer, to, **options), "batch_group", num_groups=2)
        assert convert(layer, to, **options) is revert(layer) is layer
        assert type(layer) is original
        assert layer.__dict__ == before
        assert layer.state_dict().keys() == state.keys()


def test_a_subclass_that_accepts_any_rank_still_does():
    layer = convert(AnyRank(4), "weighed")
    assert layer(torch.randn(3, 4, 5)).shape == (3, 4, 5)
    assert layer.note == "mine"


def test_a_layer_pickled_by_version_0_1_works_and_reverts():
    """There the original was another object, ``_origin``, that shared the dictionaries of the converted layer."""
    layer = with_history(nn.BatchNorm2d(8)).eval()
    origin = copy.deepcopy(layer)
    convert(layer, "ghost", ghost_size=2)
    layer.alpha = 0.3
    del layer.__dict__["_original"]
    layer.__dict__ |= {"_origin": origin, "_added_buffers": {"alpha": False, "_no_alpha": False}}
    for name in ("_parameters", "_buffers", "_modules"):
        origin.__dict__[name] = layer.__dict__[name]
    x = torch.randn(2, 8, 4, 4)
    loaded = pickle.loads(pickle.dumps(nn.Sequential(layer)))
    assert torch.equal(loaded(x), layer(x))
    assert [(change.was, change.now) for change in changes(loaded)] == [
        (f"BatchNorm2d({origin.extra_repr()})", f"GhostBatchNorm({layer.extra_repr()})")
    ]
    again = copy.deepcopy(loaded)
    assert type(convert(again, "batch_group", num_groups=2)[0]) is BatchGroupNorm
    for model in (loaded, again):
        reverted = revert(model)[0]
        assert type(reverted) is nn.BatchNorm2d
        assert reverted.__dict__.keys() == nn.BatchNorm2d(8).__dict__.keys()
        assert reverted.state_dict().keys() == nn.BatchNorm2d(8).state_dict().keys()


@pytest.fixture
def one_process(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
class TestFullySharded:
    @pytest.fixture(autouse=True)
    def _fully_shard(self):
        fsdp = pytest.importorskip("torch.distributed.fsdp")
        if not hasattr(fsdp, "fully_shard"):
            pytest.skip("this torch has no fully_shard")
        self.fully_shard = fsdp.fully_shard

    def test_a_sharded_norm_layer_is_an_error(self):
        model = small_network()
        self.fully_shard(model[1])
        with pytest.raises(ValueError, match=r"layer '1' is a FSDPBatchNorm2d: .*before calling fully_shard"):
            convert(model, "weighed")
        assert type(model[3][1]) is nn.BatchNorm2d

    def test_a_converted_layer_that_was_sharded_is_not_reverted(self):
        model = convert(small_network(), "weighed")
        self.fully_shard(model[1])
        with pytest.raises(ValueError, match="layer '1' was parametrized, sharded or otherwise changed"):
            revert(model)
