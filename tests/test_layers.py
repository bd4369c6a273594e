"""The layers against torch's own, the paper's formulas, and the rules that this library keeps."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import oracle
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from betternorm import BatchGroupNorm, BatchRenorm, GhostBatchNorm, GroupedBatchNorm, convert, set_alpha

LAYERS = {
    "grouped": lambda **options: GroupedBatchNorm(6, 3, 4, **options),
    "whole batch": lambda **options: GroupedBatchNorm(6, **options),
    "ghost": lambda **options: GhostBatchNorm(6, 4, **options),
    "batch group": lambda **options: BatchGroupNorm(2, 6, **options),
    "renorm": lambda **options: BatchRenorm(6, **options),
}
every_layer = pytest.mark.parametrize("kind", LAYERS)
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def randomized(layer: nn.Module) -> nn.Module:
    """With parameters and moving averages that are nowhere 0 or 1."""
    with torch.no_grad():
        if layer.weight is not None:
            layer.weight.normal_()
            layer.bias.normal_()
        if getattr(layer, "running_mean", None) is not None:
            layer.running_mean.normal_()
            layer.running_var.uniform_(0.5, 2)
    return layer


def same_parameters(layer: nn.Module, other: nn.Module) -> nn.Module:
    layer.load_state_dict(other.state_dict(), strict=isinstance(other, nn.modules.batchnorm._BatchNorm))
    return layer


def check_same_training(layer: nn.Module, other: nn.Module, x: Tensor) -> None:
    """Outputs and all gradients to 1e-5."""
    dy = torch.randn_like(x)
    results = []
    for one in (layer, other):
        one.zero_grad()
        one_x = x.clone(memory_format=torch.preserve_format).requires_grad_()
        y = one(one_x)
        y.backward(dy)
        results.append([y.detach(), one_x.grad, *(p.grad for p in one.parameters())])
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def close(actual: Tensor, expected: Tensor | np.ndarray, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(
        actual.detach().double(), torch.as_tensor(expected).detach().double(), rtol=tolerance, atol=tolerance
    )


# ---- the corners are torch's layers ----


@pytest.mark.parametrize("shape", [(8, 6), (8, 6, 5), (8, 6, 5, 4), (8, 6, 2, 3, 4)])
@pytest.mark.parametrize("size", [None, 8, 100])
@pytest.mark.usefixtures("way")
def test_one_channel_and_the_whole_batch_a_group_is_batch_norm(shape, size) -> None:
    kinds = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
    torch_layer = randomized(kinds[len(shape)](6))
    layer = same_parameters(GroupedBatchNorm(6, 1, size), torch_layer)
    check_same_training(layer, torch_layer, torch.randn(shape) * 2 + 1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(4, 6, 5, 4), (4, 64, 8, 8)])
@pytest.mark.usefixtures("way")
def test_one_example_a_group_is_group_norm(layout, shape) -> None:
    x = (torch.randn(shape) * 2 + 1).contiguous(memory_format=LAYOUTS[layout])
    for groups in (1, 2, shape[1] // 2, shape[1]):
        torch_layer = randomized(nn.GroupNorm(groups, shape[1]))
        per = shape[1] // groups
        check_same_training(same_parameters(GroupedBatchNorm(shape[1], per, 1), torch_layer), torch_layer, x)
        check_same_training(same_parameters(BatchGroupNorm(groups, shape[1], 1), torch_layer), torch_layer, x)


@pytest.mark.usefixtures("way")
def test_one_example_and_one_channel_a_group_is_instance_norm() -> None:
    torch_layer = randomized(nn.InstanceNorm2d(6, affine=True))
    check_same_training(same_parameters(GhostBatchNorm(6, 1), torch_layer), torch_layer, torch.randn(4, 6, 5, 4))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.usefixtures("way")
def test_a_ghost_batch_is_batch_norm_on_each_part(layout) -> None:
    torch_layer = randomized(nn.BatchNorm2d(6))
    layer = same_parameters(GhostBatchNorm(6, 4), torch_layer)
    x = torch.randn(10, 6, 3, 3).contiguous(memory_format=LAYOUTS[layout])
    close(layer(x), torch.cat([torch_layer(part) for part in x.split([4, 3, 3])]))


@pytest.mark.parametrize(
    "make",
    [GroupedBatchNorm, GhostBatchNorm, BatchRenorm, lambda c: BatchGroupNorm(c, c), lambda c: BatchGroupNorm(99, c)],
)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.usefixtures("way")
def test_alpha_0_is_torch_batch_norm_to_the_bit(make, layout, dtype) -> None:
    torch_layer = randomized(nn.BatchNorm2d(20)).to(dtype).eval()
    layer = same_parameters(make(20).to(dtype), torch_layer).eval()
    x = torch.randn(5, 20, 9, 7).to(dtype).contiguous(memory_format=LAYOUTS[layout])
    assert torch.equal(layer(x), torch_layer(x))
    layer.alpha = 0.5
    assert not torch.equal(layer(x), torch_layer(x))
    layer.alpha = 0.0
    with torch.no_grad():
        assert torch.equal(layer(x), torch_layer(x))


@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.usefixtures("way")
def test_alpha_1_is_instance_or_group_norm(groups) -> None:
    layer = randomized(BatchGroupNorm(groups, 6, alpha=1.0)).eval()
    x = torch.randn(5, 6, 4, 4)
    close(layer(x), F.group_norm(x, groups, layer.weight, layer.bias))
    with torch.no_grad():
        close(layer(x), F.group_norm(x, groups, layer.weight, layer.bias))


@every_layer
@pytest.mark.parametrize("shape", [(5, 6, 4), (5, 6, 4, 3), (5, 6, 2, 3, 4), (1, 6, 4, 4)])
@pytest.mark.usefixtures("way")
def test_inference_is_the_formula_for_any_number_of_examples(kind, shape) -> None:
    layer = randomized(LAYERS[kind](alpha=0.3)).eval()
    x = torch.randn(shape)
    wanted = oracle.infer(
        x, layer.running_mean, layer.running_var, layer.weight, layer.bias, 0.3, layer.channels_per_group
    )
    close(layer(x), wanted, 2e-5)


# ---- running statistics ----


@every_layer
@pytest.mark.parametrize("momentum", [0.1, 0.5, None])
@pytest.mark.usefixtures("way")
def test_running_statistics_are_averages_of_x_and_its_square(kind, momentum) -> None:
    layer = LAYERS[kind](momentum=momentum)
    batches = [torch.randn(n, 6, 4, 4) * scale + n for n, scale in ((8, 1), (7, 3), (10, 0.5))]
    for batch in batches:
        layer(batch)
    mean, var = oracle.moving_averages(batches, momentum)
    close(layer.running_mean, mean)
    close(layer.running_var, var)
    assert layer.num_batches_tracked == 3


@pytest.mark.usefixtures("way")
def test_running_statistics_do_not_depend_on_the_groups() -> None:
    x = torch.randn(33, 6, 4, 4) * 3 + 5
    layers = [GroupedBatchNorm(6, per, size) for per in (1, 2, 6) for size in (None, 1, 2, 16, 32, 33)]
    for layer in layers:
        layer(x)
        close(layer.running_mean, layers[0].running_mean)
        close(layer.running_var, layers[0].running_var)
        assert layer.num_batches_tracked == 1


def test_the_cumulative_average_is_that_of_all_batches_together() -> None:
    layer = GhostBatchNorm(6, 4, momentum=None)
    batches = torch.randn(5, 8, 6, 3, 3) * 2 + torch.arange(5).view(5, 1, 1, 1, 1)
    for batch in batches:
        layer(batch)
    everything = oracle.numpy(batches.flatten(0, 1))
    close(layer.running_mean, everything.mean((0, 2, 3)))
    close(layer.running_var, everything.var((0, 2, 3)))


@every_layer
def test_evaluation_changes_nothing(kind) -> None:
    layer = randomized(LAYERS[kind](alpha=0.2)).eval()
    before = copy.deepcopy(layer.state_dict())
    layer(torch.randn(4, 6, 3, 3))
    assert all(torch.equal(layer.state_dict()[key], value) for key, value in before.items())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [None, 2])
@pytest.mark.parametrize("per", [1, 3])
@pytest.mark.usefixtures("way")
def test_a_bad_batch_leaves_the_trace_that_it_leaves_in_torch(bad, layout, size, per) -> None:
    layer, torch_layer = GroupedBatchNorm(6, per, size), nn.BatchNorm2d(6)
    good = torch.randn(4, 6, 3, 3).contiguous(memory_format=LAYOUTS[layout])
    worse = good.clone()
    worse[1, 2, 0, 1] = bad
    for batch in (good, worse, good, good):
        layer(batch)
        torch_layer(batch)
        for name in ("running_mean", "running_var"):
            found, wanted = getattr(layer, name), getattr(torch_layer, name)
            assert torch.equal(found.isnan(), wanted.isnan()), name
            assert torch.equal(found.isinf(), wanted.isinf()), name
    assert layer.num_batches_tracked == torch_layer.num_batches_tracked


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@every_layer
@pytest.mark.usefixtures("way")
def test_a_bad_example_never_changes_another_at_inference(kind, bad) -> None:
    layer = randomized(LAYERS[kind]()).eval()
    x = torch.randn(5, 6, 3, 3)
    worse = x.clone()
    worse[3, 1, 1, 1] = bad
    for layer.alpha in (0.0, 0.1, 1.0):
        with torch.no_grad():
            assert torch.equal(layer(x)[:3], layer(worse)[:3])
            assert torch.equal(layer(x)[4], layer(worse)[4])


# ---- modes, types, formats ----


@every_layer
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("parameters", ["float32", "same"])
@pytest.mark.parametrize("training", [True, False])
def test_half_types(kind, dtype, parameters, training) -> None:
    layer = randomized(LAYERS[kind](alpha=0.25))
    layer = layer.to(dtype) if parameters == "same" else layer
    exact = copy.deepcopy(layer).double()
    layer.train(training), exact.train(training)
    x = (torch.randn(8, 6, 5, 5) * 3 + 10).to(dtype)
    y, wanted = layer(x), exact(x.double())
    assert y.dtype == dtype
    close(y, wanted, 8 * rounding(dtype))
    assert layer.running_mean.dtype == layer.weight.dtype
    rounded = 2 * rounding(layer.running_mean.dtype)
    close(layer.running_mean, exact.running_mean, max(rounded, 1e-5))
    close(layer.running_var, exact.running_var, max(rounded, 1e-4))


def rounding(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


@every_layer
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.usefixtures("way")
def test_the_memory_format_is_kept(kind, training) -> None:
    layer = LAYERS[kind](alpha=0.2).train(training)
    for x, memory_format in (
        (torch.randn(8, 6, 5, 4), torch.contiguous_format),
        (torch.randn(8, 6, 5, 4), torch.channels_last),
        (torch.randn(8, 6, 2, 5, 4), torch.channels_last_3d),
    ):
        x = x.contiguous(memory_format=memory_format).requires_grad_()
        y = layer(x)
        assert y.is_contiguous(memory_format=memory_format)
        y.square().sum().backward()
        assert x.grad.is_contiguous(memory_format=memory_format)
        with torch.no_grad():
            assert layer(x).is_contiguous(memory_format=memory_format)


@every_layer
def test_train_and_eval_switch_between_batch_and_moving_statistics(kind) -> None:
    net = nn.Sequential(nn.Conv2d(3, 6, 1), LAYERS[kind]())
    x = torch.randn(8, 3, 4, 4)
    net.eval()
    alone = net(x[:1])
    assert torch.allclose(net(x)[:1], alone)
    net.train()
    net(x)
    assert net[1].num_batches_tracked == 1
    net.eval()
    net(x)
    assert net[1].num_batches_tracked == 1
    assert not torch.allclose(net(x)[:1], alone)


@every_layer
def test_without_gamma_and_beta(kind) -> None:
    layer = LAYERS[kind](affine=False)
    assert not list(layer.parameters())
    y = layer(torch.randn(8, 6, 5, 5))
    if kind != "renorm":
        close(y.mean(), torch.zeros(()))
        close(y.var(correction=0), torch.ones(()), 1e-3)
    assert layer.eval()(torch.randn(1, 6, 5, 5)).shape == (1, 6, 5, 5)


# ---- alpha ----


def test_alpha_is_read_back_as_it_was_set() -> None:
    layer = GhostBatchNorm(6)
    for value in (0.1, 0.3, 1 / 3, 1.0, 0.0, 0.005):
        layer.alpha = value
        assert layer.alpha == pytest.approx(value, rel=1e-6)
    layer.alpha = 0.1
    assert layer.alpha == 0.1
    layer.alpha = torch.tensor(0.25)
    assert layer.alpha == 0.25
    layer.alpha = np.float64(0.75)
    assert layer.alpha == 0.75


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_alpha_is_not_rounded_to_the_type_of_the_layer(dtype) -> None:
    layer = GhostBatchNorm(6, alpha=0.1).to(dtype)
    assert layer.alpha == 0.1
    assert layer.float().alpha == 0.1
    assert layer.state_dict()["alpha"].dtype == torch.float32


# ---- mistakes ----


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: GroupedBatchNorm(6, 4), ValueError, "channels_per_group=4 .* 6 channels; 1, 2, 3 or 6 would"),
        (lambda: GroupedBatchNorm(7, 2), ValueError, "channels_per_group=2 .* 7 channels; 1 or 7 would"),
        (lambda: GroupedBatchNorm(6, 12), ValueError, "channels_per_group=12"),
        (lambda: GroupedBatchNorm(6, 0), ValueError, "channels_per_group=0 must be 1 or more"),
        (lambda: GroupedBatchNorm(6, -2), ValueError, "channels_per_group=-2 must be 1 or more"),
        (lambda: GroupedBatchNorm(6, 1, 0), ValueError, "examples_per_group=0 must be 1 or more or None"),
        (lambda: GroupedBatchNorm(6, 1, -1), ValueError, "examples_per_group=-1"),
        (lambda: GroupedBatchNorm(6, 2.0), TypeError, r"channels_per_group=2\.0 .* whole number"),
        (lambda: GroupedBatchNorm(6, 1, True), TypeError, "examples_per_group=True"),
        (lambda: GhostBatchNorm(6, 0), ValueError, "ghost_size=0 must be 1 or more"),
        (lambda: GhostBatchNorm(6, None), TypeError, "ghost_size=None"),
        (lambda: GhostBatchNorm(6, "16"), TypeError, "ghost_size='16'"),
        (lambda: BatchGroupNorm(4, 6), ValueError, "num_groups=4 .* 6 channels; 1, 2, 3 or 6 would"),
        (lambda: BatchGroupNorm(0, 6), ValueError, "num_groups=0 must be 1 or more"),
        (lambda: BatchGroupNorm(2, 6, 0), ValueError, "examples_per_group=0"),
        (lambda: GhostBatchNorm(6, alpha=1.5), ValueError, r"alpha=1\.5 must lie between 0 .* and 1"),
        (lambda: GhostBatchNorm(6, alpha=-0.1), ValueError, r"alpha=-0\.1 must lie between"),
        (lambda: GhostBatchNorm(6, alpha=float("nan")), ValueError, "alpha=nan must lie between"),
        (lambda: GhostBatchNorm(6, alpha=float("inf")), ValueError, "alpha=inf must lie between"),
        (lambda: setattr(GhostBatchNorm(6), "alpha", 2), ValueError, r"alpha=2\.0 must lie between"),
        (lambda: BatchRenorm(6, r_max=0.5), ValueError, r"r_max=0\.5 must be 1 or more"),
        (lambda: BatchRenorm(6, d_max=-1), ValueError, "d_max=-1 must be 0 or more"),
        (lambda: BatchRenorm(6, r_max=float("nan")), ValueError, "r_max=nan"),
        (lambda: BatchRenorm(6, warmup_steps=9, r_steps=5), ValueError, "warmup_steps=9 .* r_steps=5"),
        (lambda: BatchRenorm(6, warmup_steps=-1), ValueError, "warmup_steps=-1"),
    ],
)
def test_an_argument_that_cannot_work_is_named_with_what_would(make, error, message) -> None:
    with pytest.raises(error, match=message):
        make()


@every_layer
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("input", "error", "message"),
    [
        (torch.randn(6), ValueError, r"rank 2 or more, got shape \(6,\)"),
        (torch.tensor(1.0), ValueError, r"rank 2 or more, got shape \(\)"),
        (torch.randn(4, 5, 3, 3), ValueError, r"expected 6 channels .* got 5 .* \(4, 5, 3, 3\)"),
        (torch.ones(4, 6, 3, dtype=torch.int64), TypeError, r"torch\.int64.*input\.float\(\)"),
        (torch.ones(4, 6, 3, dtype=torch.uint8), TypeError, r"torch\.uint8"),
        (torch.ones(4, 6, 3, dtype=torch.bool), TypeError, r"torch\.bool"),
    ],
)
def test_an_input_that_cannot_work_is_named_with_what_would(kind, training, input, error, message) -> None:
    layer = LAYERS[kind]().train(training)
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(error, match=message):
        layer(input)
    assert all(torch.equal(layer.state_dict()[key], value) for key, value in before.items())


@every_layer
@pytest.mark.parametrize("shape", [(0, 6), (0, 6, 4, 4), (3, 6, 0, 4)])
@pytest.mark.usefixtures("way")
def test_an_empty_batch_is_counted_and_moves_nothing_as_in_torch(kind, shape) -> None:
    layer, torch_layer = randomized(LAYERS[kind]()), (nn.BatchNorm1d if len(shape) == 2 else nn.BatchNorm2d)(6)
    torch_layer.load_state_dict(layer.state_dict())
    for one in (layer, torch_layer):
        x = torch.empty(shape, requires_grad=True)
        y = one(x)
        assert y.shape == shape
        y.sum().backward()
        assert torch.equal(x.grad, torch.empty(shape))
        assert one.weight.grad.abs().sum() == one.bias.grad.abs().sum() == 0
    for (name, found), wanted in zip(layer.state_dict().items(), torch_layer.state_dict().values(), strict=True):
        assert torch.equal(found, wanted), name
    assert layer.num_batches_tracked == 1
    assert layer.eval()(torch.empty(shape)).shape == shape


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (GroupedBatchNorm(6), (1, 6)),
        (GroupedBatchNorm(6), (1, 6, 1, 1)),
        (GhostBatchNorm(6, 1), (8, 6, 1, 1)),
        (GhostBatchNorm(6, 2), (3, 6)),
        (BatchGroupNorm(6, 6, 1), (4, 6, 1)),
        (BatchRenorm(6), (1, 6)),
    ],
)
def test_one_value_a_group_is_the_error_of_torch(layer, shape) -> None:
    x = torch.randn(shape)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training") as ours:
        layer(x)
    with pytest.raises(ValueError, match="Expected more than 1 value") as theirs:
        nn.BatchNorm1d(6)(x[:1].flatten(1))
    assert str(ours.value).split(", got")[0] == str(theirs.value).split(", got")[0]
    assert layer.num_batches_tracked == 0
    assert layer.eval()(x).shape == shape


@pytest.mark.parametrize(("examples", "size"), [(17, 16), (33, 32), (4, 3), (129, 128), (65, 16)])
def test_one_example_more_than_a_ghost_batch_is_no_stray(examples, size) -> None:
    """Without space a group of one example would be an error."""
    assert GhostBatchNorm(6, size)(torch.randn(examples, 6)).isfinite().all()


# ---- state ----


@every_layer
def test_a_state_dict_goes_to_batch_norm_and_back_strict(kind) -> None:
    layer, torch_layer = randomized(LAYERS[kind]()), randomized(nn.BatchNorm2d(6))
    assert list(layer.state_dict()) == list(torch_layer.state_dict())
    assert {k: v.shape for k, v in layer.state_dict().items()} == {
        k: v.shape for k, v in torch_layer.state_dict().items()
    }
    layer.load_state_dict(torch_layer.state_dict())
    for key, value in torch_layer.state_dict().items():
        assert torch.equal(layer.state_dict()[key], value)
    fresh = nn.BatchNorm2d(6)
    fresh.load_state_dict(layer.state_dict())
    for key, value in layer.state_dict().items():
        assert torch.equal(fresh.state_dict()[key], value)


@every_layer
def test_alpha_is_in_the_state_dict_only_where_it_is_not_0(kind) -> None:
    net = nn.Sequential(LAYERS[kind](), LAYERS[kind](alpha=0.3))
    state = net.state_dict()
    assert [key for key in state if "alpha" in key] == ["1.alpha"]
    other = nn.Sequential(LAYERS[kind](alpha=0.9), LAYERS[kind]())
    other.load_state_dict(state)
    assert (other[0].alpha, other[1].alpha) == (0.0, 0.3)
    assert list(state) == list(net.state_dict()), "loading leaves the caller's dictionary alone"
    net[1].alpha = 0.0
    assert not [key for key in net.state_dict() if "alpha" in key]


def test_a_network_of_batch_norm_loads_into_one_that_has_alpha_and_resets_it() -> None:
    net = nn.Sequential(GhostBatchNorm(6, alpha=0.4))
    net.load_state_dict(nn.Sequential(nn.BatchNorm2d(6)).state_dict())
    assert net[0].alpha == 0.0


def test_a_state_dict_does_not_change_with_the_layer_once_it_is_copied() -> None:
    layer = GhostBatchNorm(6, alpha=0.4)
    saved = copy.deepcopy(layer.state_dict())
    layer.alpha = 0.7
    layer.load_state_dict(saved)
    assert layer.alpha == 0.4


VECTOR = torch.tensor([0.0, 0.5, 1.0, 0.25, 0.0, 0.125])
ALPHAS = {"none": 0.0, "number": 0.9, "vector": torch.linspace(0, 1, 6)}


def same_alpha(found: float | Tensor, wanted: float | Tensor) -> bool:
    if isinstance(found, Tensor) != isinstance(wanted, Tensor):
        return False
    return torch.equal(found, wanted) if isinstance(wanted, Tensor) else found == wanted


@every_layer
def test_a_vector_of_alphas_is_read_back_as_a_copy(kind) -> None:
    layer = LAYERS[kind](alpha=VECTOR)
    assert same_alpha(layer.alpha, VECTOR)
    layer.alpha.fill_(0.7)
    assert same_alpha(layer.alpha, VECTOR)
    for other in (torch.full((6,), 0.25), VECTOR.double(), VECTOR.tolist(), VECTOR.numpy()):
        layer.alpha = other
        assert same_alpha(layer.alpha, torch.as_tensor(other).float())
    assert "alpha=0 to 1 (6 channels)" in repr(layer)
    layer.alpha = 0.1
    assert layer.alpha == 0.1


@every_layer
def test_a_vector_of_zeros_is_alpha_0(kind) -> None:
    layer = randomized(LAYERS[kind](alpha=torch.zeros(6))).eval()
    assert layer.alpha == 0.0
    assert "alpha" not in layer.state_dict()
    layer.alpha = VECTOR
    layer.alpha = torch.zeros(6)
    assert layer.alpha == 0.0
    if getattr(layer, "channels_per_group", 1) == 1:
        x = torch.randn(4, 6, 5, 5)
        plain = F.batch_norm(x, layer.running_mean, layer.running_var, layer.weight, layer.bias, eps=layer.eps)
        assert torch.equal(layer(x), plain)


@pytest.mark.parametrize(
    ("alpha", "message"),
    [
        (torch.rand(5), "alpha has 5 values and the layer has 6 channels"),
        (torch.rand(2, 3), r"alpha has shape \(2, 3\) and the layer has 6 channels"),
        (torch.tensor([0.1, float("nan"), 0, 0, 0, 0]), r"alpha has 1 of 6 values outside \[0, 1\], the first is nan"),
        (torch.tensor([0.5, 0, 0, 0, -0.5, 1.5]), r"alpha has 2 of 6 values outside \[0, 1\], the first is -0.5"),
    ],
)
def test_a_vector_that_does_not_fit_is_refused_and_changes_nothing(alpha, message) -> None:
    layer = GhostBatchNorm(6, alpha=0.3)
    with pytest.raises(ValueError, match=message):
        layer.alpha = alpha
    assert layer.alpha == 0.3
    state = layer.state_dict() | {"alpha": alpha}
    with pytest.raises(RuntimeError, match=message):
        layer.load_state_dict(state)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("before", ALPHAS)
@pytest.mark.parametrize("after", ALPHAS)
@every_layer
def test_a_layer_with_any_alpha_loads_any_other(kind, before, after, assign) -> None:
    saved, layer = randomized(LAYERS[kind](alpha=ALPHAS[after])), LAYERS[kind](alpha=ALPHAS[before])
    layer.load_state_dict(copy.deepcopy(saved.state_dict()), assign=assign)
    assert same_alpha(layer.alpha, saved.alpha)
    x = torch.randn(4, 6, 5, 5)
    assert torch.equal(layer.eval()(x), saved.eval()(x))


@every_layer
def test_a_vector_of_alphas_follows_the_layer(kind) -> None:
    layer = LAYERS[kind](alpha=VECTOR)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), layer.half(), layer.to(torch.float64)):
        assert same_alpha(other.alpha, VECTOR)
        assert other.state_dict()["alpha"].dtype == torch.float32
    with torch.inference_mode():
        layer.alpha = VECTOR.flip(0)
    layer.alpha = VECTOR
    average = torch.optim.swa_utils.AveragedModel(nn.Sequential(layer), use_buffers=True)
    average.update_parameters(nn.Sequential(layer))
    assert same_alpha(average.module[0].alpha, VECTOR)


class FrozenBatchNorm2d(nn.Module):
    """What `convert` recognizes as torchvision's."""

    def __init__(self) -> None:
        super().__init__()
        self.eps = 1e-5
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.rand(6) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)


@pytest.mark.parametrize("norm", [FrozenBatchNorm2d, lambda: nn.GroupNorm(2, 6)])
def test_converted_layers_load_vectors(norm) -> None:
    net, other = (convert(nn.Sequential(norm()), "weighed") for _ in range(2))
    set_alpha(net, {"0": VECTOR})
    other.load_state_dict(net.state_dict())
    assert same_alpha(other[0].alpha, VECTOR)
    other.load_state_dict({key: value for key, value in net.state_dict().items() if key != "0.alpha"})
    assert other[0].alpha == float(norm is not FrozenBatchNorm2d)
    set_alpha(net, {"0": torch.zeros(6)})
    other.load_state_dict(net.state_dict())
    assert other[0].alpha == 0.0


@every_layer
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.usefixtures("way")
def test_alphas_that_differ_by_channel_are_mixed_by_channel(kind, layout, gradient) -> None:
    layer = randomized(LAYERS[kind](alpha=VECTOR)).eval()
    x = torch.randn(4, 6, 9, 9).mul(2).add(1).contiguous(memory_format=LAYOUTS[layout]).requires_grad_(gradient)
    moments = layer.running_mean, layer.running_var, layer.weight, layer.bias
    close(layer(x), oracle.infer(x, *moments, VECTOR, layer.channels_per_group))


def test_an_impossible_alpha_in_a_checkpoint_is_refused() -> None:
    state = GhostBatchNorm(6, alpha=0.4).state_dict()
    state["alpha"] = torch.tensor(float("nan"))
    with pytest.raises(RuntimeError, match="alpha=nan must lie between"):
        GhostBatchNorm(6).load_state_dict(state)


def test_a_foreign_key_is_still_refused() -> None:
    state = GhostBatchNorm(6, alpha=0.4).state_dict() | {"beta": torch.zeros(6)}
    with pytest.raises(RuntimeError, match="Unexpected key"):
        GhostBatchNorm(6).load_state_dict(state)


@pytest.mark.parametrize(
    ("layer", "text"),
    [
        (GroupedBatchNorm(8, 2, 4), "GroupedBatchNorm(8, channels_per_group=2, examples_per_group=4, eps=1e-05, "),
        (GhostBatchNorm(8), "GhostBatchNorm(8, ghost_size=16, eps=1e-05, momentum=0.1, affine=True)"),
        (
            GhostBatchNorm(8, alpha=0.1),
            "GhostBatchNorm(8, ghost_size=16, eps=1e-05, momentum=0.1, affine=True, alpha=0.1)",
        ),
        (BatchGroupNorm(4, 8), "BatchGroupNorm(4, 8, examples_per_group=2, "),
        (BatchRenorm(8), "BatchRenorm(8, r_max=3.0, d_max=5.0, "),
    ],
)
def test_a_layer_prints_as_it_is_made(layer, text) -> None:
    assert repr(layer).startswith(text)


def test_the_documented_defaults() -> None:
    assert GhostBatchNorm(8).ghost_size == 16
    assert (GhostBatchNorm(8).channels_per_group, GhostBatchNorm(8).examples_per_group) == (1, 16)
    assert BatchGroupNorm(4, 8).num_groups == 4
    assert (BatchGroupNorm(4, 8).channels_per_group, BatchGroupNorm(4, 8).examples_per_group) == (2, 2)
    assert BatchGroupNorm(32, 8).channels_per_group == 1, "more groups than channels is one channel per group"
    assert (GroupedBatchNorm(8).channels_per_group, GroupedBatchNorm(8).examples_per_group) == (1, None)
    assert GroupedBatchNorm(8).alpha == 0.0


def test_device_and_dtype_reach_parameters_and_buffers() -> None:
    layer = GhostBatchNorm(8, dtype=torch.float64, alpha=0.1)
    assert {t.dtype for t in (layer.weight, layer.bias, layer.running_mean, layer.running_var)} == {torch.float64}
    meta = GhostBatchNorm(8, device="meta")
    assert all(t.is_meta for t in (*meta.parameters(), *meta.buffers()))


# ---- Batch Renormalization ----


def renorm_by_hand(x: np.ndarray, mean: np.ndarray, var: np.ndarray, r_max: float, d_max: float) -> np.ndarray:
    over = (0, 2, 3)
    batch_std, std = np.sqrt(x.var(over) + 1e-5), np.sqrt(var + 1e-5)
    r = np.clip(batch_std / std, 1 / r_max, r_max)
    d = np.clip((x.mean(over) - mean) / std, -d_max, d_max)
    column = (slice(None), None, None)
    return (x - x.mean(over)[column]) / batch_std[column] * r[column] + d[column]


@pytest.mark.parametrize(
    ("step", "r_max", "d_max"),
    [(0, 1, 0), (10, 1, 0), (20, 1.5, 1.25), (30, 2, 2.5), (50, 3, 5), (10**6, 3, 5)],
)
@pytest.mark.usefixtures("way")
def test_renorm_follows_its_schedule(step, r_max, d_max) -> None:
    layer = BatchRenorm(6, affine=False, warmup_steps=10, r_steps=50, d_steps=50)
    randomized(layer)
    layer.num_batches_tracked.fill_(step)
    assert [t.item() for t in layer.limits()] == pytest.approx([r_max, d_max])
    x = torch.randn(8, 6, 4, 4) * torch.linspace(0.1, 8, 6).view(6, 1, 1) + 3
    wanted = renorm_by_hand(*map(oracle.numpy, (x, layer.running_mean, layer.running_var)), r_max, d_max)
    close(layer(x), wanted, 2e-5)


def test_renorm_has_the_schedule_of_its_paper() -> None:
    layer = BatchRenorm(6)
    for step, r_max, d_max in ((5_000, 1, 0), (25_000, 1 + 2 * 20 / 35, 5), (40_000, 3, 5)):
        layer.num_batches_tracked.fill_(step)
        assert [t.item() for t in layer.limits()] == pytest.approx([r_max, d_max])


@pytest.mark.usefixtures("way")
def test_renorm_begins_as_batch_norm() -> None:
    torch_layer = randomized(nn.BatchNorm2d(6))
    layer = same_parameters(BatchRenorm(6), torch_layer)
    check_same_training(layer, torch_layer, torch.randn(8, 6, 4, 4) * 2 + 1)


@pytest.mark.usefixtures("way")
def test_renorm_without_limits_gives_in_training_what_it_gives_at_inference() -> None:
    layer = randomized(BatchRenorm(6, r_max=1e6, d_max=1e6, warmup_steps=0, r_steps=0, d_steps=0))
    layer.num_batches_tracked.fill_(1)
    x = torch.randn(8, 6, 4, 4)
    wanted = copy.deepcopy(layer).eval()(x)
    close(layer(x), wanted)


def test_renorm_holds_r_and_d_constant_in_the_gradient() -> None:
    layer = BatchRenorm(6, r_max=100, d_max=100, warmup_steps=0, r_steps=1, d_steps=1).double()
    randomized(layer)
    layer.num_batches_tracked.fill_(5)
    x = torch.randn(8, 6, 4, 4).double().requires_grad_()
    dy = torch.randn_like(x)
    var, mean = torch.var_mean(x.detach(), (0, 2, 3), correction=0)
    std = torch.sqrt(layer.running_var + 1e-5)
    r, d = torch.sqrt(var + 1e-5) / std, (mean - layer.running_mean) / std
    shape = (1, -1, 1, 1)
    wanted = F.batch_norm(x, None, None, training=True) * r.view(shape) + d.view(shape)
    wanted = wanted * layer.weight.view(shape) + layer.bias.view(shape)
    expected = torch.autograd.grad(wanted, (x, layer.weight, layer.bias), dy)
    for found, other in zip(torch.autograd.grad(layer(x), (x, layer.weight, layer.bias), dy), expected, strict=True):
        close(found, other, 1e-10)


# ---- as torch's own layer would ----


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["weight", "bias", "running_mean", "running_var"])
@pytest.mark.parametrize("size", [1, 3, 5])
def test_a_vector_of_another_length_is_an_error(name, size, training) -> None:
    for layer in (GhostBatchNorm(4, 2, alpha=0.3), nn.BatchNorm2d(4)):
        vector = torch.ones(size)
        setattr(layer, name, nn.Parameter(vector) if name in ("weight", "bias") else vector)
        before = vector.clone()
        with pytest.raises((ValueError, RuntimeError), match=r"channels|elements|size of tensor|broadcast"):
            layer.train(training)(torch.randn(4, 4, 3, 3))
        assert torch.equal(vector, before)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("training", [True, False])
def test_a_weight_on_another_device_is_an_error(training) -> None:
    layer = GhostBatchNorm(4, 2, alpha=0.3).train(training)
    layer.weight = nn.Parameter(torch.ones(4, device="meta"))
    with pytest.raises(RuntimeError, match="meta"):
        layer(torch.randn(4, 4, 3, 3))


@every_layer
def test_track_running_stats_stops_the_averages(kind) -> None:
    layer = LAYERS[kind]()
    wanted = layer(torch.randn(6, 6, 3, 3, generator=torch.Generator().manual_seed(1)))
    state = {name: value.clone() for name, value in layer.state_dict().items()}
    layer.track_running_stats = False
    for _ in range(2):
        found = layer(torch.randn(6, 6, 3, 3, generator=torch.Generator().manual_seed(1)))
    if kind != "renorm":  # which corrects toward the averages
        torch.testing.assert_close(found, wanted)
    for name, value in layer.state_dict().items():
        assert torch.equal(value, state[name]), name


@pytest.mark.parametrize("momentum", [0.1, None])
def test_without_a_count_the_averages_move_as_in_torch(momentum) -> None:
    ours, theirs = GroupedBatchNorm(4, momentum=momentum), nn.BatchNorm2d(4, momentum=momentum)
    x = torch.randn(6, 4, 3, 3) + 1
    for layer in (ours, theirs):
        layer.num_batches_tracked = None
        layer(x)
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)
    assert ours.num_batches_tracked is None
    renorm = BatchRenorm(4)
    renorm.num_batches_tracked = None
    with pytest.raises(ValueError, match="num_batches_tracked=None"):
        renorm(x)


def test_a_count_of_another_type_counts_as_in_torch() -> None:
    ours, theirs = GroupedBatchNorm(4), nn.BatchNorm2d(4)
    x = torch.randn(6, 4, 3, 3) + 1
    for layer in (ours, theirs):
        layer.num_batches_tracked = layer.num_batches_tracked.double()
        layer(x)
        layer(x)
    assert ours.num_batches_tracked.dtype == theirs.num_batches_tracked.dtype == torch.float64
    assert ours.num_batches_tracked == theirs.num_batches_tracked == 2
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)


@every_layer
def test_it_is_a_batch_norm_to_whoever_asks(kind) -> None:
    layer = LAYERS[kind]()
    for theirs in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.modules.batchnorm._BatchNorm):
        assert isinstance(layer, theirs)
    layer.qconfig = "anything"
    assert layer.qconfig == "anything"


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_gradients_of_groups_of_two_values_are_as_exact_as_torchs(offset) -> None:
    x, dy = torch.randn(4, 8, 1) + offset, torch.randn(4, 8, 1)

    def gradient(run, dtype=torch.float32):
        leaf = x.to(dtype).requires_grad_()
        run(leaf).backward(dy.to(dtype))
        return leaf.grad.double()

    exact = gradient(lambda x: oracle.normalize(x, None, None, 1, [2, 2]), torch.float64)
    ours = (gradient(GhostBatchNorm(8, 2, affine=False)) - exact).abs().max()
    torchs = gradient(lambda x: torch.cat([F.batch_norm(part, None, None, training=True) for part in x.split(2)]))
    assert ours <= 2 * (torchs - exact).abs().max() + 1e-6


def test_a_layer_pickled_by_version_0_1_has_its_alpha() -> None:
    layer = GhostBatchNorm(4, 2, alpha=0.3)
    state = dict(vars(layer))
    state["_buffers"] = {("_alpha" if name == "alpha" else name): value for name, value in layer._buffers.items()}
    older = GhostBatchNorm.__new__(GhostBatchNorm)
    older.__setstate__(state)
    assert older.alpha == 0.3
    assert list(older.state_dict()) == list(layer.state_dict())
