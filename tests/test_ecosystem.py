"""The table of docs/compatibility.md: how other tools work with models that contain these layers.

Each row is checked by the test below it. `python tests/test_ecosystem.py` writes the table.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.checkpoint import checkpoint

from betternorm import BatchRenorm, GhostBatchNorm, GroupedBatchNorm, convert, get_alpha, revert, set_alpha
from betternorm.integrations import torchvision as torchvision_support

PAGE = Path(__file__).resolve().parents[1] / "docs" / "compatibility.md"
BEGIN, END = "<!-- the table: written by tests/test_ecosystem.py -->\n", "<!-- end of the table -->\n"
CLOSE = {"rtol": 1e-4, "atol": 1e-5}

# torch has deprecated TorchScript, the old ONNX exporter and torch.ao.
pytestmark = pytest.mark.filterwarnings("ignore")


class Row(NamedTuple):
    tool: str
    verdict: str
    words: str


ROWS: list[Row] = []


def row(tool: str, verdict: str, words: str) -> Callable[[Any], Any]:
    assert verdict in ("works", "works, with a condition", "error")
    ROWS.append(Row(tool, verdict, words))
    return lambda test: test


def page_table() -> str:
    lines = ["| tool | | what to know |", "| --- | --- | --- |"]
    return "\n".join([*lines, *(f"| {r.tool} | {r.verdict} | {r.words} |" for r in ROWS)]) + "\n"


def original() -> nn.Sequential:
    """A network with parameters and moving averages as after some training."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3),
        nn.BatchNorm2d(8),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )
    for layer in (net[1], net[4]):
        nn.init.uniform_(layer.weight, 0.5, 1.5)
        nn.init.normal_(layer.bias)
        layer.running_mean.normal_()
        layer.running_var.uniform_(0.5, 2)
    return net


def network(alpha: float = 0.3, to: str = "weighed", **options: Any) -> nn.Sequential:
    net = convert(original(), to, **options).eval()
    set_alpha(net, alpha)
    return net


def images(count: int = 4) -> Tensor:
    return torch.randn(count, 3, 9, 9, generator=torch.Generator().manual_seed(1))


# ---- inspecting and exporting ----


@row("`torch.jit.trace`", "works", "including alpha, for any batch size")
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("net", [network(), network(1.0, "group", num_groups=4), network(0.0)])
def test_traced(net, grad) -> None:
    with torch.set_grad_enabled(grad):
        traced = torch.jit.trace(net, images(2))
    torch.testing.assert_close(traced(images(7)), net(images(7)), **CLOSE)


@row("`torch.jit.script`", "error", "“torch.jit.script cannot compile …”; trace, export or compile the model")
def test_scripted() -> None:
    with pytest.raises(RuntimeError, match=r"torch.jit.script cannot compile GroupedBatchNorm.*torch.jit.trace"):
        torch.jit.script(network())


@row("`torch.fx.symbolic_trace`", "works", "the layer is one node of the graph, like torch's own layers")
@pytest.mark.parametrize("training", [True, False])
def test_symbolic_trace(training) -> None:
    net = network(to="ghost", ghost_size=2).train(training)
    other = copy.deepcopy(net)
    graph = torch.fx.symbolic_trace(other)
    assert [node.target for node in graph.graph.nodes if node.op == "call_module"] == [str(i) for i in range(8)]
    torch.testing.assert_close(graph(images()), net(images()))
    assert torch.equal(other[1].running_mean, net[1].running_mean)


@row("torchvision's `create_feature_extractor`", "works", "with the names of the original layers")
def test_create_feature_extractor() -> None:
    torchvision_support.ready()
    models = pytest.importorskip("torchvision.models")
    extraction = pytest.importorskip("torchvision.models.feature_extraction")
    net = convert(models.resnet18(), "ghost").eval()
    set_alpha(net, 0.2)
    extractor = extraction.create_feature_extractor(net, ["layer1.0.bn1", "fc"])
    x = torch.randn(1, 3, 64, 64)
    found = extractor(x)
    assert found["layer1.0.bn1"].shape == (1, 64, 16, 16)
    torch.testing.assert_close(found["fc"], net(x))


@row("`torch.export`", "works", "for any batch size; the exported program does not need this package")
def test_exported() -> None:
    net = network()
    program = torch.export.export(net, (images(2),), dynamic_shapes=({0: torch.export.Dim("batch")},))
    assert "betternorm" not in str(program.graph)
    torch.testing.assert_close(program.module()(images(7)), net(images(7)), **CLOSE)


@row("ONNX, `dynamo=True`", "works", "for any batch size")
@row(
    "ONNX, `dynamo=False`",
    "works",
    "for any batch size. If two layers have equal gammas, as before training, torch's exporter merges them and the "
    "file does not load; `keep_initializers_as_inputs=True` avoids this",
)
@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize("net", [network(), network(1.0, "group", num_groups=4)])
def test_onnx(net, dynamo, tmp_path) -> None:
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    path = tmp_path / "net.onnx"
    sizes: dict[str, Any] = {"dynamic_shapes": ({0: torch.export.Dim("batch")},)}
    if not dynamo:
        sizes = {"input_names": ["x"], "dynamic_axes": {"x": {0: "batch"}}}
    torch.onnx.export(net, (images(2),), path, dynamo=dynamo, verbose=False, **sizes)
    session = runtime.InferenceSession(path)
    (found,) = session.run(None, {session.get_inputs()[0].name: images(7).numpy()})
    torch.testing.assert_close(torch.from_numpy(found), net(images(7)).detach(), rtol=1e-4, atol=1e-4)


@row("`torch.compile`", "works", "one graph for alpha 0 and one for all other values")
@pytest.mark.parametrize("training", [True, False])
def test_compiled(training) -> None:
    torch.compiler.reset()
    net = network(to="ghost", ghost_size=2).train(training)
    other = copy.deepcopy(net)
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(images()), net(images()), **CLOSE)
    torch.testing.assert_close(other[1].running_var, net[1].running_var)


@row("TensorBoard, `add_graph`", "works", "")
def test_tensorboard(tmp_path) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard", reason="tensorboard is missing")
    with tensorboard.SummaryWriter(tmp_path) as writer:
        writer.add_graph(network(), images())
    assert any(file.stat().st_size > 1000 for file in tmp_path.iterdir())


@row(
    "fvcore, `FlopCountAnalysis`",
    "works",
    "with alpha, the statistics of the example are listed as unsupported operators",
)
def test_fvcore() -> None:
    fvcore = pytest.importorskip("fvcore.nn", reason="fvcore is missing")
    wanted = fvcore.FlopCountAnalysis(original().eval(), images()).by_operator()
    assert fvcore.FlopCountAnalysis(network(0.0), images()).by_operator() == wanted
    found = fvcore.FlopCountAnalysis(network(), images()).by_operator()
    assert found["conv"] == wanted["conv"]


@row("`torch.utils.flop_counter`", "works", "")
def test_flop_counter() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    flops = []
    for net in (original().eval(), network(), network().train()):
        with FlopCounterMode(display=False) as counter:
            net(images())
        flops.append(counter.get_total_flops())
    assert len(set(flops)) == 1


# ---- derivatives and transforms ----


@row("`torch.func.functional_call`", "works", "also with a `state_dict`: alpha is a buffer")
def test_functional_call() -> None:
    net = network()
    torch.testing.assert_close(torch.func.functional_call(net, net.state_dict(), (images(),)), net(images()))
    state = net.state_dict() | {"1.alpha": torch.tensor(1.0)}
    found = torch.func.functional_call(net, state, (images(),))
    set_alpha(net, {"1": 1.0})
    torch.testing.assert_close(found, net(images()))


@row(
    "`torch.func.vmap`",
    "works, with a condition",
    "in training with `track_running_stats = False`, as for torch's own layer: the moving averages cannot follow "
    "several batches at once",
)
def test_vmap() -> None:
    x = torch.stack([images(), 2 * images(), images() + 1])
    for net in (network(), network(to="ghost", ghost_size=2).train()):
        for layer in (net[1], net[4]):
            layer.track_running_stats = False
        torch.testing.assert_close(torch.vmap(net)(x), torch.stack([net(one) for one in x]), **CLOSE)
    with pytest.raises(RuntimeError):
        torch.vmap(GhostBatchNorm(3, 2))(x)


@row("`torch.func.replace_all_batch_norm_modules_`", "works", "the layer then uses batch statistics, in groups")
def test_without_moving_averages() -> None:
    layer = convert(nn.Sequential(nn.BatchNorm2d(3)), "ghost", ghost_size=2)
    wanted = layer(images())
    torch.func.replace_all_batch_norm_modules_(layer)
    for mode in (True, False):
        torch.testing.assert_close(layer.train(mode)(images()), wanted)
    assert layer[0].running_mean is None


@row("forward-mode differentiation", "works", "`jacfwd` in training with the condition of `vmap`")
@pytest.mark.parametrize("training", [True, False])
def test_forward_mode(training) -> None:
    net = network(to="ghost", ghost_size=2).train(training)
    x, direction = images(2), images(2).flip(0)
    _, wanted = torch.autograd.functional.jvp(net, x, direction)
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(net(forward_ad.make_dual(x, direction))).tangent
    torch.testing.assert_close(found, wanted, **CLOSE)
    assert wanted.abs().max() > 1e-3
    for layer in (net[1], net[4]):
        layer.track_running_stats = False
    wanted = torch.autograd.functional.jacobian(net, x)
    torch.testing.assert_close(torch.func.jacfwd(net)(x), wanted, **CLOSE)
    found = torch.autograd.functional.jacobian(net, x, strategy="forward-mode", vectorize=True)
    torch.testing.assert_close(found, wanted, **CLOSE)


@row("batched gradients, `is_grads_batched`", "works", "")
@pytest.mark.parametrize("training", [True, False])
def test_batched_gradients(training) -> None:
    x = images().requires_grad_()
    y = network(to="ghost", ghost_size=2).train(training)(x)
    directions = torch.randn(3, *y.shape)
    (found,) = torch.autograd.grad(y, x, directions, is_grads_batched=True, retain_graph=True)
    wanted = [torch.autograd.grad(y, x, one, retain_graph=True)[0] for one in directions]
    torch.testing.assert_close(found, torch.stack(wanted))


# ---- training ----


@row(
    "activation checkpointing",
    "works, with a condition",
    "each batch is counted once; torch's own layer counts it twice. Inside a separately compiled block it is counted "
    "twice: compile the function that calls `checkpoint` instead. Batches that a custom autograd function passes "
    "through the layer in its backward pass are not counted",
)
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant) -> None:
    layer = GhostBatchNorm(3, 2)
    checkpoint(layer, images().requires_grad_(), use_reentrant=reentrant).sum().backward()
    assert layer.num_batches_tracked == 1

    torch.compiler.reset()
    layer, theirs = GhostBatchNorm(3, 2), nn.BatchNorm2d(3)
    for one in (layer, theirs):
        compiled = torch.compile(one, backend="aot_eager")
        checkpoint(compiled, images().requires_grad_(), use_reentrant=False).sum().backward()
    assert layer.num_batches_tracked == theirs.num_batches_tracked == 2  # the limit that the row names

    layer = GhostBatchNorm(3, 2)
    whole = torch.compile(lambda x: checkpoint(layer, x, use_reentrant=False), backend="aot_eager")
    whole(images().requires_grad_()).sum().backward()
    assert layer.num_batches_tracked == 1


@row(
    "activation checkpointing of `BatchRenorm`",
    "error",
    "“BatchRenorm cannot be checkpointed …”. A separately compiled block cannot detect this: keep the layer outside",
)
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_renorm(reentrant) -> None:
    y = checkpoint(BatchRenorm(3), images().requires_grad_(), use_reentrant=reentrant)
    with pytest.raises(RuntimeError, match="BatchRenorm cannot be checkpointed"):
        y.sum().backward()


@pytest.fixture
def one_process(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@row(
    "`DistributedDataParallel`",
    "works",
    "statistics are per process, or across processes with `process_group`. Convert before wrapping, and set alpha in "
    "every process",
)
@pytest.mark.usefixtures("one_process")
def test_distributed_data_parallel() -> None:
    net = network().train()
    wanted = copy.deepcopy(net)
    wrapped = nn.parallel.DistributedDataParallel(net)
    wrapped(images()).sum().backward()
    wanted(images()).sum().backward()
    torch.testing.assert_close(net[1].weight.grad, wanted[1].weight.grad)
    with pytest.raises(ValueError, match="wrapped in DistributedDataParallel"):
        convert(wrapped, "ghost")


@row("FSDP, `fully_shard`", "works", "convert before sharding; converting a sharded layer is an error")
@pytest.mark.usefixtures("one_process")
def test_fully_sharded() -> None:
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("this torch has no fully_shard")
    net = network(to="ghost", ghost_size=2).train()
    wanted = copy.deepcopy(net)
    for module in (net[1], net[4], net):
        fsdp.fully_shard(module)
    net(images()).sum().backward()
    wanted(images()).sum().backward()
    torch.testing.assert_close(net[1].weight.grad.full_tensor(), wanted[1].weight.grad)
    torch.testing.assert_close(net.eval()(images()), wanted.eval()(images()))
    assert get_alpha(net) == 0.3


@row(
    "`SyncBatchNorm.convert_sync_batchnorm`, timm's, Lightning's `sync_batchnorm=True`",
    "error",
    '“… would replace … and drop …”; call `convert(model, ..., process_group="world")` instead',
)
def test_convert_sync_batchnorm() -> None:
    net = network(0.0)
    with pytest.raises(RuntimeError, match=r"would replace GroupedBatchNorm and drop .* process_group=\"world\""):
        nn.SyncBatchNorm.convert_sync_batchnorm(net)
    assert isinstance(net[1], GroupedBatchNorm)
    torchvision_support.ready()
    timm_layers = pytest.importorskip("timm.layers")
    with pytest.raises(RuntimeError, match=r"would replace GroupedBatchNorm and drop alpha=0.3"):
        timm_layers.convert_sync_batchnorm(network())


@row(
    "`AveragedModel` (EMA, SWA), `update_bn`",
    "works",
    "set alpha on the averaged model after averaging; it is not copied from the other model",
)
@pytest.mark.parametrize("use_buffers", [True, False])
def test_weight_averaging(use_buffers) -> None:
    net = network(0.0)
    average = AveragedModel(net, use_buffers=use_buffers)
    average.update_parameters(net)
    set_alpha(net, 0.3)
    average.update_parameters(net)
    for key, value in average.module.state_dict().items():
        torch.testing.assert_close(value, net.state_dict()[key])
    assert get_alpha(average.module) == 0
    update_bn([images(), images() + 1], average)
    assert average.module[1].num_batches_tracked == 2


@row(
    "timm's `ModelEmaV3`",
    "works, with a condition",
    "set alpha after averaging: updating is an error if only one of the two models has alphas",
)
def test_timm_ema() -> None:
    torchvision_support.ready()
    timm_utils = pytest.importorskip("timm.utils")
    net = network(0.0)
    average = timm_utils.ModelEmaV3(net, decay=0.5)
    with torch.no_grad():
        net[1].running_mean.zero_()
    wanted = average.module[1].running_mean / 2
    average.update(net)
    torch.testing.assert_close(average.module[1].running_mean, wanted)
    set_alpha(net, 0.3)
    with pytest.raises((RuntimeError, KeyError)):
        average.update(net)


# ---- freezing ----


@row(
    "Lightning's `BaseFinetuning`, `BackboneFinetuning`",
    "works",
    "`track_running_stats = False` stops updates of the moving averages",
)
def test_lightning_freezes() -> None:
    torchvision_support.ready()
    callbacks = pytest.importorskip("lightning.pytorch.callbacks")
    net = network(to="ghost", ghost_size=2).train()
    before = copy.deepcopy(net.state_dict())
    callbacks.BaseFinetuning.freeze(net, train_bn=False)
    net(images())
    for key, value in net.state_dict().items():
        assert torch.equal(value, before[key]), key
    callbacks.BaseFinetuning.make_trainable(net)
    net(images())
    assert net[1].num_batches_tracked == before["1.num_batches_tracked"] + 1


@row(
    "timm's `freeze`, `freeze_batch_norm_2d`",
    "works, with a condition",
    "for alpha = 0 and one channel per group. Otherwise an error, “… would replace … and drop …”: freeze first, then "
    '`convert(model, "weighed")` adds alpha to the frozen layers',
)
def test_timm_freezes() -> None:
    torchvision_support.ready()
    timm = pytest.importorskip("timm")
    net = network(0.0)
    before = net(images())
    timm.utils.freeze(net)
    torch.testing.assert_close(net.train()(images()), before)
    torch.testing.assert_close(net(images()), before)  # nothing has moved
    with pytest.raises(RuntimeError, match=r"would replace GroupedBatchNorm and drop alpha=0.3"):
        timm.utils.freeze(network())
    with pytest.raises(RuntimeError, match=r"drop .*channels_per_group=2"):
        timm.utils.freeze(network(0.0, "group", num_groups=4))
    with pytest.raises(RuntimeError, match=r"drop what runs after it \(act\)"):
        timm.utils.model.freeze_batch_norm_2d(convert(timm.layers.BatchNormAct2d(8), "weighed"))
    with pytest.raises(RuntimeError, match="drop inputs that are not images"):
        timm.utils.model.freeze_batch_norm_2d(convert(nn.BatchNorm1d(8), "weighed"))


@row("timm's `convert_splitbn_model`", "error", "“… would replace … and drop …”")
def test_timm_splits() -> None:
    torchvision_support.ready()
    timm_layers = pytest.importorskip("timm.layers")
    with pytest.raises(RuntimeError, match="convert_splitbn_model would replace GroupedBatchNorm"):
        timm_layers.convert_splitbn_model(network(0.0))


# ---- serving ----


@row(
    "`fuse_conv_bn_eval`, `fuse_linear_bn_eval`",
    "works, with a condition",
    "for alpha = 0 and one channel per group. Otherwise an error, “… would replace … and drop …”; `betternorm.fold` "
    "folds the layers for which that is exact",
)
def test_fused_into_the_convolution() -> None:
    net = network(0.0)
    fused = nn.utils.fusion.fuse_conv_bn_eval(net[0], net[1])
    torch.testing.assert_close(fused(images()), net[1](net[0](images())), **CLOSE)
    for other, what in ((network(), "alpha=0.3"), (network(0.0, "group", num_groups=4), "channels_per_group=2")):
        with pytest.raises(
            RuntimeError, match=rf"would replace GroupedBatchNorm and drop {what}; betternorm.fold\(model"
        ):
            nn.utils.fusion.fuse_conv_bn_eval(other[0], other[1])
    layer = convert(nn.BatchNorm1d(4), "weighed").eval()
    layer.alpha = 0.1
    with pytest.raises(RuntimeError, match="fuse_linear_bn_eval would replace"):
        nn.utils.fusion.fuse_linear_bn_eval(nn.Linear(3, 4).eval(), layer)


REPARAMETERIZED = {
    "repvgg_a0": "RepVggBlock",
    "repvit_m0_9": "ConvNorm",
    "levit_128s": "ConvNorm",
    "mobileone_s0": "MobileOneBlock",
    "fastvit_t8": "MobileOneBlock",
    "efficientvit_m0": "ConvNorm",
    "shvit_s1": "Conv2dNorm",
    "tiny_vit_5m_224": "ConvNorm",
    "ghostnetv3_050": "GhostModule",
    "repghostnet_050": "RepGhostModule",
    "lcnetv2_small": "RepDepthwiseSeparable",
    "nextvit_small": "merge_pre_bn",
}


@row(
    "timm's `reparameterize_model`, `--reparam`",
    "works, with a condition",
    "for alpha = 0. Otherwise an error, “… would replace … and drop alpha …”: reparameterize first, then convert. "
    "After `betternorm.fold` it is an error too",
)
@pytest.mark.parametrize(
    "name",
    [name if number < 3 else pytest.param(name, marks=pytest.mark.slow) for number, name in enumerate(REPARAMETERIZED)],
)
def test_reparameterized_by_timm(name) -> None:
    torchvision_support.ready()
    timm = pytest.importorskip("timm")
    if not timm.is_model(name):
        pytest.skip(f"this timm has no {name}")
    torch.manual_seed(0)
    net = timm.create_model(name).eval()
    norms = {name: layer for name, layer in net.named_modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)}
    for layer in norms.values():
        nn.init.uniform_(layer.weight, 0.5, 1.5)
        layer.running_var.uniform_(0.5, 2)
    convert(net, "weighed", where=list(norms))
    x = torch.randn(1, *net.pretrained_cfg["input_size"])
    with torch.no_grad():
        expected = net(x)
        found = timm.utils.reparameterize_model(net)
        assert sum(isinstance(layer, GroupedBatchNorm) for layer in found.modules()) < len(norms)
        torch.testing.assert_close(found(x), expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))
        set_alpha(net, dict.fromkeys(norms, 0.1))
        message = rf"timm\.models\..*{REPARAMETERIZED[name]}.* would replace GroupedBatchNorm and drop alpha=0.1"
        with pytest.raises(RuntimeError, match=message):
            timm.utils.reparameterize_model(net)


def their_fusion(conv: nn.Conv2d, bn: nn.BatchNorm2d) -> Tensor:
    return conv.weight * (bn.weight / (bn.running_var + bn.eps).sqrt()).view(-1, 1, 1, 1), -bn.running_mean


def their_copy(norm: nn.BatchNorm2d) -> nn.BatchNorm2d:
    copied = nn.BatchNorm2d(norm.num_features)
    for name in ("weight", "bias", "running_mean", "running_var", "eps"):
        setattr(copied, name, getattr(norm, name))
    return copied


@row(
    "other functions that fuse or replace batch norm",
    "works, with a condition",
    "for alpha = 0 and one channel per group. Otherwise an error, “… would replace … and drop …”, from functions that "
    "read `running_mean` and whose code mentions `running_var` and `eps`",
)
def test_other_replacements() -> None:
    net = network(0.0)
    their_fusion(net[0], net[1])
    torch.testing.assert_close(their_copy(net[1]).eval()(net[0](images())), net[1](net[0](images())))
    net[1].alpha = 0.3
    for replace in (lambda: their_fusion(net[0], net[1]), lambda: their_copy(net[1])):
        with pytest.raises(
            RuntimeError, match=r"test_ecosystem.their_\w+ would replace GroupedBatchNorm and drop alpha"
        ):
            replace()
    assert net[1].running_mean.shape == (8,)  # others may read it


@row("`torch.utils.mkldnn.to_mkldnn`", "works, with a condition", "for alpha = 0, as above")
def test_to_mkldnn() -> None:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no mkldnn")
    from torch.utils import mkldnn

    found = mkldnn.to_mkldnn(network(0.0)[:2])(images().to_mkldnn()).to_dense()
    torch.testing.assert_close(found, network(0.0)[:2](images()), **CLOSE)
    with pytest.raises(RuntimeError, match="would replace GroupedBatchNorm and drop alpha"):
        mkldnn.to_mkldnn(network())


@row("`replace_batch_norm` of DETR models in Transformers", "works, with a condition", "for alpha = 0, as above")
def test_transformers_detr() -> None:
    torchvision_support.ready()
    detr = pytest.importorskip("transformers.models.detr.modeling_detr")
    net = network(0.0)
    expected = net(images())
    with torch.no_grad():
        detr.replace_batch_norm(net)
    assert type(net[1]) is detr.DetrFrozenBatchNorm2d
    torch.testing.assert_close(net(images()), expected, **CLOSE)
    with torch.no_grad(), pytest.raises(RuntimeError, match="replace_batch_norm would replace GroupedBatchNorm"):
        detr.replace_batch_norm(network())


@row("`torch.fx.experimental.optimization.fuse`", "works", "does not fold the layer")
def test_fused_by_fx() -> None:
    from torch.fx.experimental.optimization import fuse

    net = network()
    torch.testing.assert_close(fuse(net)(images()), net(images()))


@row("torch.ao, `quantize_dynamic`", "works", "the layer is unchanged")
def test_quantize_dynamic() -> None:
    net = network()
    quantized = torch.ao.quantization.quantize_dynamic(net, {nn.Linear}, dtype=torch.qint8)
    assert type(quantized[7]) is not nn.Linear
    assert get_alpha(quantized) == 0.3
    torch.testing.assert_close(quantized(images()), net(images()), rtol=0.05, atol=0.02)


@row("torch.ao, `prepare_fx` and `convert_fx`", "works", "the layer stays in floating point")
def test_quantized_by_fx() -> None:
    from torch.ao.quantization import get_default_qconfig_mapping
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

    if "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("this torch has no fbgemm")
    net = network()
    prepared = prepare_fx(copy.deepcopy(net), get_default_qconfig_mapping("fbgemm"), (images(),))
    prepared(images())
    torch.testing.assert_close(convert_fx(prepared)(images()), net(images()), rtol=0.1, atol=0.05)


@row("torch.ao, `fuse_modules`", "error", "“did not find fuser method for …”")
def test_fuse_modules() -> None:
    with pytest.raises((AssertionError, NotImplementedError), match="did not find fuser method"):
        torch.ao.quantization.fuse_modules(network(0.0), [["0", "1"]])


# ---- changing a layer ----


@row("`torch.nn.utils.prune`", "works", "`revert` keeps the masks")
def test_pruned() -> None:
    net = network(0.0)
    prune.random_unstructured(net[1], "weight", 0.5)
    before = net(images())
    revert(net)
    assert type(net[1]) is nn.BatchNorm2d
    assert "1.weight_mask" in net.state_dict()
    torch.testing.assert_close(net(images()), before)
    prune.remove(net[1], "weight")
    torch.testing.assert_close(net(images()), before)


@row(
    "`torch.nn.utils.parametrize`",
    "works, with a condition",
    "parametrize converted layers. `convert` skips parametrized layers with a warning, and `revert` raises an error",
)
def test_parametrised() -> None:
    net = network()
    before = net(images())
    nn.utils.parametrizations.weight_norm(net[1], dim=None)
    torch.testing.assert_close(net(images()), before)
    with pytest.raises(ValueError, match="layer '1' was parametrized, sharded or otherwise changed"):
        revert(net)
    assert isinstance(net[4], GroupedBatchNorm)
    nn.utils.parametrize.remove_parametrizations(net[1], "weight")
    assert type(revert(net)[1]) is nn.BatchNorm2d


@row("`deepcopy`, pickle, `torch.save`", "works", "")
def test_copied(tmp_path) -> None:
    net = network(to="ghost", ghost_size=2)
    torch.save(net, tmp_path / "net.pt")
    for other in (copy.deepcopy(net), torch.load(tmp_path / "net.pt", weights_only=False)):
        assert torch.equal(other(images()), net(images()))
        assert get_alpha(other) == 0.3


def test_the_page_has_this_table() -> None:
    page = PAGE.read_text()
    written = page[page.index(BEGIN) + len(BEGIN) : page.index(END)]
    assert written.strip() == page_table().strip(), "update it with: python tests/test_ecosystem.py"


if __name__ == "__main__":
    text = PAGE.read_text()
    PAGE.write_text(text[: text.index(BEGIN) + len(BEGIN)] + "\n" + page_table() + "\n" + text[text.index(END) :])
