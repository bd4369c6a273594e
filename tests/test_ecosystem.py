"""The table of docs/compatibility.md, row by row: what tools that know batch norm make of these layers.

A row is a test: what the table says is checked by the function below it. `python tests/test_ecosystem.py` writes the
table anew.
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

# Tools speak about themselves: torch has deprecated TorchScript, the old ONNX exporter and torch.ao.
pytestmark = pytest.mark.filterwarnings("ignore")


class Row(NamedTuple):
    tool: str
    verdict: str
    words: str


ROWS: list[Row] = []


def row(tool: str, verdict: str, words: str) -> Callable[[Any], Any]:
    assert verdict in ("works", "works, with a condition", "refused")
    ROWS.append(Row(tool, verdict, words))
    return lambda test: test


def page_table() -> str:
    lines = ["| tool | | what to know |", "| --- | --- | --- |"]
    return "\n".join([*lines, *(f"| {r.tool} | {r.verdict} | {r.words} |" for r in ROWS)]) + "\n"


def original() -> nn.Sequential:
    """As after some training."""
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


# ---- looking into a network ----


@row("`torch.jit.trace`", "works", "with alpha inside, for any batch size")
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("net", [network(), network(1.0, "group", num_groups=4), network(0.0)])
def test_traced(net, grad) -> None:
    with torch.set_grad_enabled(grad):
        traced = torch.jit.trace(net, images(2))
    torch.testing.assert_close(traced(images(7)), net(images(7)), **CLOSE)


@row("`torch.jit.script`", "refused", "“torch.jit.script cannot compile …”; trace, export or compile the network")
def test_scripted() -> None:
    with pytest.raises(RuntimeError, match=r"torch.jit.script cannot compile GroupedBatchNorm.*torch.jit.trace"):
        torch.jit.script(network())


@row("`torch.fx.symbolic_trace`", "works", "the layer stays whole in the graph, as torch's own do")
@pytest.mark.parametrize("training", [True, False])
def test_symbolic_trace(training) -> None:
    net = network(to="ghost", ghost_size=2).train(training)
    other = copy.deepcopy(net)
    graph = torch.fx.symbolic_trace(other)
    assert [node.target for node in graph.graph.nodes if node.op == "call_module"] == [str(i) for i in range(8)]
    torch.testing.assert_close(graph(images()), net(images()))
    assert torch.equal(other[1].running_mean, net[1].running_mean)


@row("torchvision's `create_feature_extractor`", "works", "under the names of the original layers")
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


@row("`torch.export`", "works", "for any batch size; the program runs without this package")
def test_exported() -> None:
    net = network()
    program = torch.export.export(net, (images(2),), dynamic_shapes=({0: torch.export.Dim("batch")},))
    assert "betternorm" not in str(program.graph)
    torch.testing.assert_close(program.module()(images(7)), net(images(7)), **CLOSE)


@row("ONNX, `dynamo=True`", "works", "for any batch size")
@row(
    "ONNX, `dynamo=False`",
    "works",
    "for any batch size. Where two layers have equal gammas, as before training, torch's exporter joins them and the "
    "file does not load; `keep_initializers_as_inputs=True` avoids it",
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


@row("fvcore, `FlopCountAnalysis`", "works", "with alpha, what is done per example is listed as unsupported operators")
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


@row("`torch.func.functional_call`", "works", "with a `state_dict` too: alpha is a buffer like the others")
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
    "in training with `track_running_stats = False`: there is one set of averages and many batches. torch's own layer "
    "has the same condition",
)
def test_vmap() -> None:
    x = torch.stack([images(), 2 * images(), images() + 1])
    for net in (network(), network(to="ghost", ghost_size=2).train()):
        for layer in (net[1], net[4]):
            layer.track_running_stats = False
        torch.testing.assert_close(torch.vmap(net)(x), torch.stack([net(one) for one in x]), **CLOSE)
    with pytest.raises(RuntimeError):
        torch.vmap(GhostBatchNorm(3, 2))(x)


@row("`torch.func.replace_all_batch_norm_modules_`", "works", "the layer then normalises by the batch, in groups")
def test_without_moving_averages() -> None:
    layer = convert(nn.Sequential(nn.BatchNorm2d(3)), "ghost", ghost_size=2)
    wanted = layer(images())
    torch.func.replace_all_batch_norm_modules_(layer)
    for mode in (True, False):
        torch.testing.assert_close(layer.train(mode)(images()), wanted)
    assert layer[0].running_mean is None


@row("forward-mode differentiation", "works", "`jacfwd` in training under the condition of `vmap`")
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
    "a batch is counted once, where torch's own layer counts it twice. Inside a block that is compiled by itself it is "
    "counted twice here too: compile the function that calls `checkpoint` instead. What an autograd function of your "
    "own runs in its backward pass is not counted",
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
    "refused",
    "“BatchRenorm cannot be checkpointed …”. Not in a block that is compiled by itself, which cannot tell that it runs "
    "again: leave the layer outside",
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
    "statistics are per process, or across processes with `process_group`; convert before wrapping, and set alpha in "
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


@row("FSDP, `fully_shard`", "works", "convert before sharding")
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
    "refused",
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
    "set alpha on the averaged network when averaging is over; an average does not take it from the other",
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
    "set alpha when averaging is over: an update of a network with alphas and an average without, or the other way "
    "round, is an error",
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


@row("Lightning's `BaseFinetuning`, `BackboneFinetuning`", "works", "`track_running_stats = False` stops the averages")
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
    "at alpha = 0 with one channel per group. Otherwise refused, “… would replace … and drop …”: freeze first, and "
    '`convert(model, "weighed")` then gives the frozen layers an alpha',
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
    with pytest.raises(RuntimeError, match=r"drop what runs after it \(drop, act\)"):
        timm.utils.model.freeze_batch_norm_2d(convert(timm.layers.BatchNormAct2d(8), "weighed"))
    with pytest.raises(RuntimeError, match="drop inputs that are not images"):
        timm.utils.model.freeze_batch_norm_2d(convert(nn.BatchNorm1d(8), "weighed"))


@row("timm's `convert_splitbn_model`", "refused", "“… would replace … and drop …”")
def test_timm_splits() -> None:
    torchvision_support.ready()
    timm_layers = pytest.importorskip("timm.layers")
    with pytest.raises(RuntimeError, match="convert_splitbn_model would replace GroupedBatchNorm"):
        timm_layers.convert_splitbn_model(network(0.0))


# ---- serving ----


@row(
    "`fuse_conv_bn_eval`, `fuse_linear_bn_eval`",
    "works, with a condition",
    "at alpha = 0 with one channel per group. Otherwise refused, “… would replace … and drop …”; `betternorm.fold` "
    "folds what can be folded",
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


@row("`torch.fx.experimental.optimization.fuse`", "works", "leaves the layer where it is")
def test_fused_by_fx() -> None:
    from torch.fx.experimental.optimization import fuse

    net = network()
    torch.testing.assert_close(fuse(net)(images()), net(images()))


@row("torch.ao, `quantize_dynamic`", "works", "the layer stays as it is")
def test_quantize_dynamic() -> None:
    net = network()
    quantised = torch.ao.quantization.quantize_dynamic(net, {nn.Linear}, dtype=torch.qint8)
    assert type(quantised[7]) is not nn.Linear
    assert get_alpha(quantised) == 0.3
    torch.testing.assert_close(quantised(images()), net(images()), rtol=0.05, atol=0.02)


@row("torch.ao, `prepare_fx` and `convert_fx`", "works", "the layer stays in floating point")
def test_quantised_by_fx() -> None:
    from torch.ao.quantization import get_default_qconfig_mapping
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

    if "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("this torch has no fbgemm")
    net = network()
    prepared = prepare_fx(copy.deepcopy(net), get_default_qconfig_mapping("fbgemm"), (images(),))
    prepared(images())
    torch.testing.assert_close(convert_fx(prepared)(images()), net(images()), rtol=0.1, atol=0.05)


@row("torch.ao, `fuse_modules`", "refused", "“did not find fuser method for …”")
def test_fuse_modules() -> None:
    with pytest.raises((AssertionError, NotImplementedError), match="did not find fuser method"):
        torch.ao.quantization.fuse_modules(network(0.0), [["0", "1"]])


# ---- changing a layer ----


@row("`torch.nn.utils.prune`", "works", "`revert` keeps what it has added")
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
    "on converted layers. `convert` and `revert` leave or refuse a parametrised layer with the reason",
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
    assert written.strip() == page_table().strip(), "write it anew with: python tests/test_ecosystem.py"


if __name__ == "__main__":
    text = PAGE.read_text()
    PAGE.write_text(text[: text.index(BEGIN) + len(BEGIN)] + "\n" + page_table() + "\n" + text[text.index(END) :])
