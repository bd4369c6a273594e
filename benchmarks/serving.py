"""What alpha costs a network that is served: in no layer, in all, and in one, three and five of them.

    python -m benchmarks.serving --only onnxruntime --rounds 60     # docs/serving.md has the tables
    python -m benchmarks.serving --only compiled --networks resnet50

Networks are served as people serve them: everything without alpha is folded into the convolution before it. All
variants of a network run in one process and take turns; a ratio is that to alpha nowhere in the same runtime.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from betternorm_lab.models.cifar_resnets import CifarResNet
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import betternorm
from benchmarks.__main__ import processor
from benchmarks.measuring import compare
from betternorm.display.tables import table
from betternorm.integrations import torchvision as torchvision_support
from betternorm.weighing.alpha import weighed_layers

ALPHA = 0.1  # the cost does not depend on it
LAYERS = (1, 3, 5)
BATCHES = (1, 8)

Run = Callable[[], object]


def resnet50() -> nn.Module:
    from torchvision import models

    return models.resnet50(weights=None)


def mobilenet_v2() -> nn.Module:
    from torchvision import models

    return models.mobilenet_v2(weights=None)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "resnet50": (resnet50, 224),
    "mobilenet_v2": (mobilenet_v2, 224),
    "cifar_resnet20": (lambda: CifarResNet(20), 32),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=RUNTIMES, nargs="+", default=list(RUNTIMES))
    parser.add_argument("--networks", choices=NETWORKS, nargs="+", default=list(NETWORKS))
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--rounds", type=int, default=40, help="turns that every variant takes (40)")
    parser.add_argument("--threads", type=int, default=2, help="default: 2")
    parser.add_argument("--clock", choices=("wall", "processor"), default="wall", help="processor: with one thread")
    parser.add_argument("--json", type=Path, default=Path("serving.json"), help="default: serving.json")
    arguments = parser.parse_args()
    torchvision_support.ready()
    torch.manual_seed(0)
    torch.set_num_threads(arguments.threads)
    machine = {
        "torch": torch.__version__,
        "processor": processor(),
        "threads": arguments.threads,
        "rounds": arguments.rounds,
        "clock": arguments.clock,
        "load": round(os.getloadavg()[0], 1),
    }
    rows: list[dict[str, Any]] = []
    for network in arguments.networks:
        variants, size = served(network)
        for runtime in arguments.only:
            with TemporaryDirectory() as folder:
                prepared = {name: RUNTIMES[runtime](model, size, Path(folder)) for name, model in variants.items()}
                for batch in arguments.batches:
                    torch.compiler.reset()  # of one function torch compiles eight variants at most
                    images = torch.randn(batch, 3, size, size)
                    runs = {name: run_on(images) for name, run_on in prepared.items()}
                    for name, ratio in compare(runs, arguments.rounds, arguments.clock).items():
                        where = {"network": network, "runtime": runtime, "batch": batch, "alpha in": name}
                        rows.append(where | vars(ratio))
                    print(f"{network}, {runtime}, batch {batch}", file=sys.stderr)
                    arguments.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    print(*(f"{key}: {value}" for key, value in machine.items()), sep="\n")
    names = list(dict.fromkeys(row["alpha in"] for row in rows))
    cases = list(dict.fromkeys((row["network"], row["runtime"], row["batch"]) for row in rows))
    lines = []
    for case in cases:
        found = {r["alpha in"]: r for r in rows if (r["network"], r["runtime"], r["batch"]) == case}
        lines.append(
            [*case, f"{found[names[0]]['milliseconds']:.1f}", *(f"{found[n]['ratio']:.2f}" for n in names[1:])]
        )
    print(f"\n{table(['network', 'runtime', 'batch', 'ms, alpha nowhere', *names[1:]], lines)}")


def served(network: str) -> tuple[dict[str, nn.Module], int]:
    """The network with alpha nowhere, everywhere and in a few layers, spread evenly over its depth; all folded."""
    build, size = NETWORKS[network]
    model = betternorm.convert(build(), "weighed").eval()
    settle(model)
    layers = list(weighed_layers(model))
    chosen: dict[str, list[str]] = {"nowhere": [], "everywhere": layers}
    for count in LAYERS:
        chosen[f"{count} layers" if count > 1 else "1 layer"] = [
            layers[round((2 * i + 1) * len(layers) / (2 * count) - 0.5)] for i in range(count)
        ]
    variants = {}
    for name, where in chosen.items():
        variant = copy.deepcopy(model)
        betternorm.set_alpha(variant, dict.fromkeys(where, ALPHA))
        variants[name] = betternorm.fold(variant) if where != layers else variant
    return variants, size


def settle(model: nn.Module) -> None:
    """Give the layers averages, gamma and beta that are not 0 and 1, which a runtime could leave out."""
    for layer in model.modules():
        if isinstance(layer, _BatchNorm):
            for tensor, low, high in ((layer.running_mean, -0.1, 0.1), (layer.running_var, 0.8, 1.25)):
                assert tensor is not None
                nn.init.uniform_(tensor, low, high)
            nn.init.uniform_(layer.weight, 0.8, 1.25)
            nn.init.uniform_(layer.bias, -0.1, 0.1)


# ---- runtimes: a model to a function that gives, for images, what is timed ----


def in_onnxruntime(model: nn.Module, size: int, folder: Path) -> Callable[[Tensor], Run]:
    import onnxruntime

    path = folder / "model.onnx"
    export_onnx(model, size, path)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    # Several sessions take turns: threads that go on spinning after a run would slow down the one whose turn it is.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda images: lambda: session.run(None, {name: images.numpy()})


def export_onnx(model: nn.Module, size: int, path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter about itself
        any_batch = ({0: torch.export.Dim("batch", min=1, max=4096)},)
        images = torch.randn(2, 3, size, size)
        torch.onnx.export(model, (images,), path, dynamo=True, verbose=False, dynamic_shapes=any_batch)


def eager(model: nn.Module, size: int, folder: Path) -> Callable[[Tensor], Run]:
    del size, folder

    def run_on(images: Tensor) -> Run:
        @torch.inference_mode()
        def run() -> Tensor:
            return model(images)

        return run

    return run_on


def compiled(model: nn.Module, size: int, folder: Path) -> Callable[[Tensor], Run]:
    return eager(torch.compile(model, dynamic=False), size, folder)


RUNTIMES = {"onnxruntime": in_onnxruntime, "eager": eager, "compiled": compiled}

if __name__ == "__main__":
    main()
