"""Images and labels of train_mnist.py: MNIST, or scikit-learn's digits enlarged to 28x28."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import TensorDataset

Data = tuple[TensorDataset, TensorDataset]
"""What to train on, and what to test on."""


def load(kind: str, root: Path, download: bool) -> tuple[str, Data]:
    """Returns the name of the data and the data. Collective.

    `kind` is "mnist", "digits", or "auto", which is MNIST if its files are in `root`.
    """
    if download and os.environ["LOCAL_RANK"] == "0":
        load_mnist(root, download=True)
    dist.barrier()  # no rank reads a file that another rank is still writing
    is_there = (root / "MNIST" / "raw" / "train-images-idx3-ubyte").exists()
    if kind == "mnist" or (kind == "auto" and is_there):
        return "MNIST", load_mnist(root)
    return "scikit-learn digits, enlarged to 28x28", load_digits()


def load_mnist(root: Path, download: bool = False) -> Data:
    from torchvision.datasets import MNIST

    def load(train: bool) -> TensorDataset:
        # Convert all samples to tensors once: decoding and normalising sample by sample would take
        # longer than the training.
        mnist = MNIST(root, train=train, download=download)
        images = (mnist.data.float() / 255 - 0.1307) / 0.3081
        return TensorDataset(images.unsqueeze(1), mnist.targets)

    return load(train=True), load(train=False)


def load_digits() -> Data:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1)
    images = F.interpolate(images, size=(28, 28), mode="bilinear", align_corners=False)
    labels = torch.from_numpy(digits.target).long()
    # The same 80 / 20 split in every run, whatever --seed is.
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order.split([len(images) * 4 // 5, len(images) - len(images) * 4 // 5])
    images = (images - images[train].mean()) / images[train].std()
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])
