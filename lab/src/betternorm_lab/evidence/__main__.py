"""``python -m betternorm_lab.evidence NAME`` runs an experiment of Round 3; started again, it resumes."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from betternorm_lab.evidence import imagenet_alpha
from betternorm_lab.evidence.index import EXPERIMENTS, status, write_pages
from betternorm_lab.evidence.runs import Places, require_committed, write_selection


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m betternorm_lab.evidence", description=__doc__)
    parser.add_argument("name", choices=[*EXPERIMENTS, "pages"], help='"pages" writes all pages from the rows')
    parser.add_argument("--plan", action="store_true", help="list what is left to run, and run nothing")
    parser.add_argument("--select", action="store_true", help="try the candidates on validation data, with seed 0")
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder of the datasets, NAME.npz")
    parser.add_argument("--weights", type=Path, default=Path("weights"), help="folder of pretrained weights")
    parser.add_argument("--work", type=Path, default=Path("runs/evidence"), help="unfinished and large files")
    parser.add_argument("--out", type=Path, default=Path("docs/results/evidence"), help="folder of rows and pages")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    places = Places(arguments.data, arguments.weights, arguments.work, arguments.out)
    if arguments.name == "pages":
        imagenet_alpha.refresh(places)
        write_pages(places)
        return
    experiment = EXPERIMENTS[arguments.name]
    if arguments.plan:
        print("\n".join([f"{arguments.name}: {status(places, experiment)}; left:", *experiment.plan(places)]))
        return
    require_committed()
    if arguments.select:
        write_selection(places, arguments.name, experiment.select(places))
    else:
        experiment.compute(places)


if __name__ == "__main__":
    main()
