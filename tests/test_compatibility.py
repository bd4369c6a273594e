"""The layers with the rest of torch: each works, or fails loudly with the reason."""

from __future__ import annotations

import copy
import io
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.checkpoint import checkpoint

from betternorm import BatchGroupNorm, BatchRenorm, GhostBatchNorm, GroupedBatchNorm
from betternorm.backends import cpu, routing

LAYERS = {
    "grouped": lambda **options: GroupedBatchNorm(4, 2, 3, **options),
    "whole batch": lambda **options: GroupedBatchNorm(4, **options),
    "ghost": lambda **options: GhostBatchNorm(4, 2, **options),
    "batch group": lambda **options: BatchGroupNorm(2, 4, **options),
    "renorm": lambda **options: BatchRenorm(4, warmup_steps=0, r_steps=5, d_steps=5, **options),
}
every_layer = pytest.mark.parametrize("kind", LAYERS)
# torch's compiler uses what torch has deprecated.
quiet_compiler = pytest.mark.filterwarnings("ignore::DeprecationWarning")
needs_cxx = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")),
    reason="torch.compile needs a C++ compiler",
)


def network(**options: object) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False),
        GhostBatchNorm(4, 2, **options),
        nn.ReLU(),
        nn.Conv2d(4, 4, 1),
        BatchGroupNorm(2, 4, 2, **options),
    )


def same_state(one: nn.Module, other: nn.Module) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return list(ours) == list(theirs) and all(torch.equal(ours[key], theirs[key]) for key in ours)


# ---- gradients ----


@every_layer
@pytest.mark.parametrize("shape", [(4, 4, 3), (5, 4, 2, 2), (5, 4)])
@pytest.mark.parametrize("mode", ["training", "evaluation", "evaluation with alpha"])
def test_gradients_of_first_and_second_order(kind, shape, mode) -> None:
    """Groups of 4 are even and those of 5 uneven for sizes of 2 and 3."""
    if kind in ("ghost", "grouped") and shape == (5, 4) and mode == "training":
        # A ghost batch of one example without space has no statistics; of two it is a step function.
        layer = GhostBatchNorm(4, 3, eps=0.1).double()
    else:
        layer = LAYERS[kind](alpha=0.3 if "alpha" in mode else 0.0, eps=0.1).double()
    layer.train(mode == "training")
    layer.num_batches_tracked.fill_(3)
    if kind == "renorm" and layer.training:
        # Constant in the gradient are r and d: differences agree where both stand at their limits.
        layer.running_mean.fill_(500)
        layer.running_var.fill_(1e4)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(4, dtype=torch.float64, requires_grad=True)
    buffers = dict(layer.named_buffers())

    def run(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        state = {name: buffer.clone() for name, buffer in buffers.items()}
        return torch.func.functional_call(layer, {"weight": weight, "bias": bias} | state, (x,))

    assert torch.autograd.gradcheck(run, (x, weight, bias))
    assert torch.autograd.gradgradcheck(run, (x, weight, bias))


@every_layer
@pytest.mark.parametrize("wanted", ["x", "weight", "bias"])
def test_second_order_with_only_one_gradient_asked_for(kind, wanted) -> None:
    layer = LAYERS[kind]().double()
    inputs = {"x": torch.randn(4, 4, 3).double(), "weight": torch.randn(4).double(), "bias": torch.randn(4).double()}
    inputs[wanted].requires_grad_()

    def run(tensor: Tensor) -> Tensor:
        given = inputs | {wanted: tensor}
        state = {name: buffer.clone() for name, buffer in layer.named_buffers()}
        y = torch.func.functional_call(layer, {k: given[k] for k in ("weight", "bias")} | state, (given["x"],))
        return y.sin()  # not linear in any of them

    assert torch.autograd.gradgradcheck(run, (inputs[wanted],))


@pytest.mark.usefixtures("way")
def test_a_gradient_penalty_in_float32_is_that_in_float64() -> None:
    x = torch.randn(6, 3, 5, 5)
    results = []
    net = network()
    for dtype in (torch.float32, torch.float64):
        one = copy.deepcopy(net).to(dtype)
        one_x = x.to(dtype, copy=True).requires_grad_()
        (gradient,) = torch.autograd.grad(one(one_x).sin().sum(), one_x, create_graph=True)
        gradient.square().sum().backward()
        results.append([one_x.grad, *(p.grad for p in one.parameters())])
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-3, atol=1e-3 * wanted.abs().max().item() + 1e-5)


def test_functional_transforms_see_through_the_layer() -> None:
    layer = GhostBatchNorm(4, 2)
    x = torch.randn(4, 4, 3, 3)

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        state = {name: buffer.clone() for name, buffer in layer.named_buffers()}
        return torch.func.functional_call(layer, parameters | state, (x,)).sin().sum()

    found = torch.func.grad(loss)({name: p.detach() for name, p in layer.named_parameters()})
    layer(x).sin().sum().backward()
    torch.testing.assert_close(found["weight"], layer.weight.grad)
    torch.testing.assert_close(found["bias"], layer.bias.grad)


# ---- copies ----


@every_layer
def test_deepcopy_and_pickle_keep_everything(kind) -> None:
    layer = LAYERS[kind](alpha=0.3, momentum=0.2)
    layer(torch.randn(6, 4, 3, 3))
    x = torch.randn(6, 4, 3, 3)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(file, weights_only=False)]
    for other in copies:
        assert repr(other) == repr(layer)
        assert other.alpha == 0.3
        assert same_state(other, layer)
        assert torch.equal(copy.deepcopy(other).eval()(x), copy.deepcopy(layer).eval()(x))
        assert torch.equal(other(x), copy.deepcopy(layer)(x))
    copies[0].alpha = 0.9
    assert layer.alpha == 0.3


def test_a_state_dict_is_saved_and_loaded_with_weights_only(tmp_path: Path) -> None:
    net = network(alpha=0.2)
    torch.save(net.state_dict(), tmp_path / "net.pt")
    other = network()
    other.load_state_dict(torch.load(tmp_path / "net.pt", weights_only=True))
    assert same_state(net, other)
    assert [layer.alpha for layer in (other[1], other[4])] == [0.2, 0.2]


def test_a_network_on_the_meta_device_takes_its_state_by_assignment() -> None:
    net = network(alpha=0.2)
    with torch.device("meta"):
        other = network()
    assert other(torch.empty(4, 3, 5, 5, device="meta")).shape == (4, 4, 3, 3)
    other.load_state_dict(net.state_dict(), assign=True)
    x = torch.randn(4, 3, 5, 5)
    assert torch.equal(other.eval()(x), net.eval()(x))
    assert other[1].alpha == 0.2


@every_layer
def test_a_layer_on_the_meta_device_prints_and_has_shapes(kind) -> None:
    layer = LAYERS[kind](device="meta", alpha=0.1)
    assert type(layer).__name__ in repr(layer)
    x = torch.empty(6, 4, 3, 3, device="meta")
    assert layer(x).shape == layer.eval()(x).shape == x.shape


# ---- contexts ----


@every_layer
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_trains_in_float32_statistics(kind, dtype) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), LAYERS[kind](), nn.Conv2d(4, 2, 1))
    exact = copy.deepcopy(net)
    x = torch.randn(6, 3, 5, 5) + 2
    inner = []
    net[1].register_forward_hook(lambda module, inputs, output: inner.append((inputs[0].dtype, output.dtype)))
    with torch.autocast("cpu", dtype):
        y = net(x)
    y.float().sin().sum().backward()
    wanted = exact(x)
    wanted.sin().sum().backward()
    assert inner == [(dtype, dtype)]
    assert net[1].running_mean.dtype == net[1].weight.grad.dtype == torch.float32
    torch.testing.assert_close(y.float(), wanted, rtol=0.05, atol=0.1)
    torch.testing.assert_close(net[1].running_mean, exact[1].running_mean, rtol=0.02, atol=0.02)
    torch.testing.assert_close(net[1].weight.grad, exact[1].weight.grad, rtol=0.1, atol=1.0)


@every_layer
@pytest.mark.usefixtures("way")
def test_inference_mode(kind) -> None:
    layer = LAYERS[kind](alpha=0.2).eval()
    x = torch.randn(5, 4, 3, 3)
    wanted = layer(x).detach()
    with torch.inference_mode():
        torch.testing.assert_close(layer(x), wanted, rtol=1e-5, atol=1e-5)
        layer.alpha = 0.0
        layer.alpha = 0.5
    layer.alpha = 0.2  # outside again
    torch.testing.assert_close(layer(x.requires_grad_()).detach(), wanted, rtol=1e-5, atol=1e-5)
    layer(x).sum().backward()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", [kind for kind in LAYERS if kind != "renorm"])
def test_activation_checkpointing_counts_a_batch_once(kind, reentrant) -> None:
    layer = LAYERS[kind]()
    plain = copy.deepcopy(layer)
    x = torch.randn(6, 4, 3, 3)
    for _ in range(2):
        with_checkpoint, without = (x.clone().requires_grad_() for _ in range(2))
        layer.zero_grad(), plain.zero_grad()
        checkpoint(layer, with_checkpoint, use_reentrant=reentrant).sin().sum().backward()
        plain(without).sin().sum().backward()
    assert layer.num_batches_tracked == 2
    assert same_state(layer, plain)
    torch.testing.assert_close(with_checkpoint.grad, without.grad)
    torch.testing.assert_close(layer.weight.grad, plain.weight.grad)


def test_activation_checkpointing_of_renorm_with_fixed_averages_is_exact() -> None:
    """It is refused where the averages move (tests/test_ecosystem.py)."""
    layer = LAYERS["renorm"]()
    layer.num_batches_tracked.fill_(3)
    layer.track_running_stats = False
    x, other = (torch.randn(6, 4, 3, 3, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2))
    checkpoint(layer, x, use_reentrant=False).sin().sum().backward()
    layer(other).sin().sum().backward()
    torch.testing.assert_close(x.grad, other.grad)


# ---- tools of torch that know batch norm ----


def test_update_bn_collects_the_statistics_anew() -> None:
    net = network(alpha=0.2)
    net(torch.randn(8, 3, 5, 5) * 100)
    batches = list(torch.randn(4, 6, 3, 5, 5) + 1)
    update_bn(batches, net)
    assert net[1].num_batches_tracked == 4
    assert net[1].momentum == 0.1
    assert net[1].alpha == 0.2
    with torch.no_grad():
        inner = net[0](torch.cat(batches))
    torch.testing.assert_close(net[1].running_mean, inner.mean((0, 2, 3)), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(net[1].running_var, inner.var((0, 2, 3), correction=0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("use_buffers", [True, False])
def test_weight_averaging(use_buffers) -> None:
    net = network(alpha=0.2)
    average = AveragedModel(net, use_buffers=use_buffers)
    weights = []
    for _ in range(3):
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(torch.randn_like(parameter))
        average.update_parameters(net)
        weights.append(net[1].weight.detach().clone())
    torch.testing.assert_close(average.module[1].weight.detach(), torch.stack(weights).mean(0))
    assert average.module[1].alpha == 0.2
    assert isinstance(average.module[4], BatchGroupNorm)
    update_bn(list(torch.randn(2, 6, 3, 5, 5)), average)
    assert average.module[1].num_batches_tracked == 2


def test_functional_call_with_parameters_and_buffers() -> None:
    net = network(alpha=0.2).eval()
    x = torch.randn(4, 3, 5, 5)
    tensors = {k: v.clone() for k, v in (*net.named_parameters(), *net.named_buffers())}
    assert torch.equal(torch.func.functional_call(net, tensors, (x,)), net(x))
    tensors["1.weight"] = tensors["1.weight"] * 2
    assert not torch.equal(torch.func.functional_call(net, tensors, (x,)), net(x))


# ---- compiled and exported ----


@needs_cxx
@quiet_compiler
@pytest.mark.parametrize("fused", [True, False])
def test_compiled_training_is_eager_training(fused, monkeypatch) -> None:
    if not fused:
        monkeypatch.setattr(routing, "has_kernels", lambda x: False)
    elif not cpu.loaded:
        pytest.skip(cpu.status)
    torch.compiler.reset()
    net = network()
    net.append(nn.Conv2d(4, 4, 1)).append(GroupedBatchNorm(4)).append(
        BatchRenorm(4, warmup_steps=0, r_steps=2, d_steps=2)
    )
    eager = copy.deepcopy(net)
    compiled = torch.compile(net, fullgraph=True)
    for examples in (6, 6, 7):
        x = torch.randn(examples, 3, 5, 5)
        for one, run in ((net, compiled), (eager, eager)):
            one.zero_grad()
            one.x = x.clone().requires_grad_()
            one.y = run(one.x)
            one.y.sin().sum().backward()
        torch.testing.assert_close(net.y, eager.y, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(net.x.grad, eager.x.grad, rtol=1e-3, atol=1e-3)
        for found, wanted in zip(net.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-3, atol=1e-3)
        for (name, found), wanted in zip(net.named_buffers(), eager.buffers(), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4, msg=name)
    assert net[1].num_batches_tracked == 3


def compiled_calls(layer: nn.Module, x: Tensor) -> list[list[str]]:
    """What the forward and the backward graph of a compiled layer call."""
    torch.compiler.reset()
    graphs = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return make_boxed_func(graph.forward)

    y = torch.compile(layer, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))(x)
    y.backward(torch.randn_like(x))
    return graphs


@quiet_compiler
def test_ghost_batch_norm_is_left_to_the_compiler() -> None:
    for calls in compiled_calls(GhostBatchNorm(4, 2), torch.randn(6, 4, 3, 5).requires_grad_()):
        assert calls
        assert not [name for name in calls if name.startswith("betternorm")]


@quiet_compiler
@pytest.mark.skipif(not cpu.loaded, reason=cpu.status)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_compiled_graph_does_not_copy_the_gradient_into_another_format(memory_format) -> None:
    x = torch.randn(6, 4, 3, 5).contiguous(memory_format=memory_format).requires_grad_()
    forward, backward = compiled_calls(GroupedBatchNorm(4, 2, 2), x)
    assert "betternorm.forward.default" in forward
    assert not [name for name in backward if "getitem" not in name and not name.startswith("betternorm")]
    assert x.grad.is_contiguous(memory_format=memory_format)


@needs_cxx
@quiet_compiler
def test_compiled_inference_follows_alpha_without_compiling_again() -> None:
    torch.compiler.reset()
    net = network().eval()
    compiled = torch.compile(net, fullgraph=True)
    x = torch.randn(3, 3, 5, 5)
    with torch.no_grad():
        for alpha in (0.0, 0.1):
            for layer in (net[1], net[4]):
                layer.alpha = alpha
            torch.testing.assert_close(compiled(x), net(x), rtol=1e-4, atol=1e-4)
        with torch.compiler.set_stance("fail_on_recompile"):
            for alpha in (0.7, 0.0, 1.0):
                for layer in (net[1], net[4]):
                    layer.alpha = alpha
                torch.testing.assert_close(compiled(x), net(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("alpha", [0.0, 0.3])
def test_export_for_any_batch_size(alpha) -> None:
    net = network(alpha=alpha).eval()
    batch = torch.export.Dim("batch")
    program = torch.export.export(net, (torch.randn(3, 3, 5, 5),), dynamic_shapes=({0: batch},))
    operators = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert not [name for name in operators if "betternorm" in name], "a graph to be run elsewhere has torch alone"
    for examples in (2, 7):
        x = torch.randn(examples, 3, 5, 5)
        torch.testing.assert_close(program.module()(x), net(x), rtol=1e-5, atol=1e-5)
