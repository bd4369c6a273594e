"""Shared fixtures: real datasets where available, and one thread on a busy machine."""

import subprocess
import sys

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def real_data(external_file, tmp_path_factory):
    """A folder with cifar100.npz, flowers102.npz and caltech101.npz."""
    unpack = external_file("data/unpack.py")
    folder = tmp_path_factory.mktemp("data")
    for name in ("cifar100", "flowers102", "caltech101"):
        subprocess.run([sys.executable, str(unpack), name, str(folder)], check=True, stdout=subprocess.DEVNULL)
    return folder
