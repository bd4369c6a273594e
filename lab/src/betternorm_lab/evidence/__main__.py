"""``python -m betternorm_lab.evidence NAME``: run an experiment of Round 3; started again, it goes on where it stopped."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from betternorm_lab.evidence import imagenet_alpha
from betternorm_lab.evidence.runs import Places, require_committed

EXPERIMENTS = {imagenet_alpha.NAME: imagenet_alpha}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m betternorm_lab.evidence", description=__doc__)
    parser.add_argument("name", choices=list(EXPERIMENTS))
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder of the datasets, NAME.npz")
    parser.add_argument("--weights", type=Path, default=Path("weights"), help="folder of pretrained weights")
    parser.add_argument("--work", type=Path, default=Path("runs/evidence"), help="unfinished and large files")
    parser.add_argument("--out", type=Path, default=Path("docs/results/evidence"), help="folder of rows and pages")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    places = Places(arguments.data, arguments.weights, arguments.work, arguments.out)
    require_committed()
    EXPERIMENTS[arguments.name].compute(places)


if __name__ == "__main__":
    main()
