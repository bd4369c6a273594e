"""Two processes over gloo with a process group against one process that has the whole batch."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor, nn

from betternorm import BatchGroupNorm, BatchRenorm, GhostBatchNorm, GroupedBatchNorm

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed")

SHAPES = {"no space": (6,), "maps": (6, 3, 3)}
# Examples of each process, and the layer. A ghost size of 4 on 6 + 6 has a group that reaches across the two.
CASES = {
    "whole batch": ((4, 4), lambda **options: GroupedBatchNorm(6, **options)),
    "whole batch, unequal": ((5, 2), lambda **options: GroupedBatchNorm(6, **options)),
    "one example in one process": ((1, 6), lambda **options: GhostBatchNorm(6, 7, **options)),
    "ghosts inside": ((4, 4), lambda **options: GhostBatchNorm(6, 4, **options)),
    "ghosts across": ((6, 6), lambda **options: GhostBatchNorm(6, 4, **options)),
    "ghosts across, uneven": ((6, 5), lambda **options: GhostBatchNorm(6, 4, **options)),
    "channel groups": ((3, 3), lambda **options: BatchGroupNorm(2, 6, 2, **options)),
    "channel groups, unequal": ((2, 5), lambda **options: BatchGroupNorm(3, 6, 3, **options)),
    "no gamma": ((4, 3), lambda **options: GhostBatchNorm(6, 4, affine=False, **options)),
    "cumulative": ((4, 3), lambda **options: GhostBatchNorm(6, 4, momentum=None, **options)),
    "renorm": ((4, 3), lambda **options: BatchRenorm(6, warmup_steps=0, r_steps=1, d_steps=1, **options)),
}
STEPS = 2
UNLIKE_SIZES = {
    "unlike sizes": lambda **options: GroupedBatchNorm(6, **options),
    "unlike sizes, channel groups": lambda **options: GroupedBatchNorm(6, 2, **options),
}


def data(sizes: tuple[int, int], shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    whole = (STEPS, sum(sizes), *shape)
    offset = torch.arange(sum(sizes)).view(-1, *(1,) * len(shape)) / 3  # unlike examples: a wrong grouping shows
    return torch.randn(whole, generator=draw) + offset, torch.randn(whole, generator=draw)


def images_of_unlike_sizes() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(2)
    shapes = ((4, 6, 3, 3), (2, 6, 5, 7))
    return [(torch.randn(s, generator=draw) + s[0], torch.randn(s, generator=draw)) for s in shapes]


def train(layer: nn.Module, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """Output and gradients of the last step, and what the layer is after it."""
    for one_x, one_dy in zip(x, dy, strict=True):
        layer.zero_grad()
        leaf = one_x.clone().requires_grad_()
        y = layer(leaf)
        y.backward(one_dy)
    parameters = {f"gradient of {name}": p.grad for name, p in layer.named_parameters()}
    return {"y": y.detach(), "dx": leaf.grad} | parameters | dict(layer.named_buffers())


def work(rank: int, folder: str) -> None:
    """All cases in one pair of processes, because starting one takes seconds."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    found = {}
    for case, (sizes, make) in CASES.items():
        for kind, shape in SHAPES.items():
            x, dy = (t.split(sizes, 1)[rank] for t in data(sizes, shape))
            found[case, kind] = train(make(process_group=dist.group.WORLD), x, dy)

    found["without a group"] = train(GhostBatchNorm(6, 4), *(t.split((4, 4), 1)[rank] for t in data((4, 4), (6, 3, 3))))

    x, dy = (t.split((4, 4), 1)[rank][0] for t in data((4, 4), (6, 3, 3)))
    net = nn.parallel.DistributedDataParallel(
        nn.Sequential(nn.Conv2d(6, 6, 1), GhostBatchNorm(6, 8, process_group=dist.group.WORLD))
    )
    net.module.load_state_dict(fixed_network().state_dict())
    net(x).backward(dy)
    found["DDP"] = {name: p.grad for name, p in net.module.named_parameters()}

    layer = GhostBatchNorm(6, 4, alpha=0.3, process_group=dist.group.WORLD).eval()
    if rank == 0:  # inference needs no other process
        found["inference"] = {"y": layer(x).detach(), "wanted": GhostBatchNorm(6, 4, alpha=0.3).eval()(x).detach()}
    for case, make in UNLIKE_SIZES.items():
        x, dy = images_of_unlike_sizes()[rank]
        found[case] = train(make(process_group=dist.group.WORLD), x[None], dy[None])

    x, dy = data((5, 1), (6, 3, 3))
    x, dy = (x[:, :5], dy[:, :5]) if rank == 0 else (x[:, :0], dy[:, :0])
    net = nn.Sequential(nn.Conv2d(6, 6, 1), GhostBatchNorm(6, 3, process_group=dist.group.WORLD))
    net.load_state_dict(fixed_network().state_dict())
    found["an empty batch"] = train(nn.parallel.DistributedDataParallel(net), x, dy)
    try:
        GhostBatchNorm(6, 3, process_group=dist.group.WORLD)(torch.randn(0, 6))
    except ValueError as error:
        found["all empty"] = str(error)
    try:
        GhostBatchNorm(6, 1, process_group=dist.group.WORLD)(torch.randn(3, 6))
    except ValueError as error:
        found["one value per group"] = str(error)
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def fixed_network() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Conv2d(6, 6, 1), GhostBatchNorm(6, 8))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    folder: Path = tmp_path_factory.mktemp("gloo")
    multiprocessing.spawn(work, (str(folder),), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def close(actual: Tensor, expected: Tensor, name: str) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5, msg=lambda text: f"{name}: {text}")


@pytest.mark.parametrize("case", UNLIKE_SIZES)
def test_images_of_unlike_sizes_weigh_by_their_values(case, found) -> None:
    """As in SyncBatchNorm: all values of a channel side by side are one batch."""
    parts = images_of_unlike_sizes()
    x, dy = (torch.cat([t[i].transpose(0, 1).flatten(1) for t in parts], 1)[None, None] for i in range(2))
    wanted = train(UNLIKE_SIZES[case](), x, dy)
    for name in ("y", "dx"):
        flat = torch.cat([results[case][name].transpose(0, 1).flatten(1) for results in found], 1)
        close(flat[None], wanted[name], name)
    for name in ("running_mean", "running_var"):
        for results in found:
            close(results[case][name], wanted[name], name)


def test_a_process_with_an_empty_batch_keeps_up_with_the_others(found) -> None:
    net = fixed_network()
    net[1].examples_per_group = 3
    x, dy = (t[:, :5] for t in data((5, 1), (6, 3, 3)))
    wanted = train(net, x, dy)
    first, second = (results["an empty batch"] for results in found)
    close(first["y"], wanted["y"], "y")
    assert second["y"].shape == (0, 6, 3, 3)
    for name, value in wanted.items():
        if name.startswith("gradient"):
            for results in (first, second):
                close(results[name.replace("of ", "of module.")], value / 2, name)  # DDP's mean over two
        elif name not in ("y", "dx"):
            close(second[f"module.{name}"], value, name)
    assert all("all empty" in results and "empty" in results["all empty"] for results in found)


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("case", CASES)
def test_two_processes_are_one_on_the_whole_batch(case, kind, found) -> None:
    sizes, make = CASES[case]
    wanted = train(make(), *data(sizes, SHAPES[kind]))
    first, second = (results[case, kind] for results in found)
    assert first.keys() == wanted.keys()
    for name, value in wanted.items():
        if name in ("y", "dx"):
            close(torch.cat((first[name], second[name])), value, name)
        elif name.startswith("gradient"):  # of the loss of both, as DDP would add it up
            close(first[name] + second[name], value, name)
        else:
            close(first[name], value, name)
            close(second[name], value, name)


def test_without_a_process_group_statistics_are_per_process(found) -> None:
    for results, x, dy in zip(found, *(t.split((4, 4), 1) for t in data((4, 4), (6, 3, 3))), strict=True):
        for name, value in train(GhostBatchNorm(6, 4), x, dy).items():
            close(results["without a group"][name], value, name)


def test_ddp_averages_what_one_process_computes(found) -> None:
    net = fixed_network()
    x, dy = (t[0] for t in data((4, 4), (6, 3, 3)))
    net(x).backward(dy)
    for name, parameter in net.named_parameters():
        for results in found:
            close(results["DDP"][name], parameter.grad / 2, name)


def test_inference_does_not_wait_for_the_others(found) -> None:
    assert torch.equal(found[0]["inference"]["y"], found[0]["inference"]["wanted"])


def test_one_value_a_group_is_the_error_of_torch_in_all_processes(found) -> None:
    for results in found:
        assert results["one value per group"].startswith("Expected more than 1 value per channel when training")


def test_a_group_of_one_process_is_that_process(tmp_path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        alone = GhostBatchNorm(6, 4)
        x, dy = data((4, 4), (6, 3, 3))
        together = copy.deepcopy(alone)
        together.process_group = dist.group.WORLD
        wanted = train(alone, x, dy)
        for name, value in train(together, x, dy).items():
            assert torch.equal(value, wanted[name]), name
    finally:
        dist.destroy_process_group()
