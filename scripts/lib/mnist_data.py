"""Data of train_mnist.py: MNIST if its files are present, otherwise scikit-learn's digits."""

import argparse
import functools
import gzip
import importlib.util
import shutil
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from lib.output import replacing
from lib.training_job import Refused, on_all_ranks

MNIST_FILES = [
    f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")
]


class DataError(Refused):
    """The data cannot be used."""


class Data(NamedTuple):
    name: str
    source: str
    train: TensorDataset
    test: TensorDataset


def import_mnist() -> Any:
    try:
        from torchvision.datasets import MNIST
    except (ImportError, RuntimeError) as error:  # RuntimeError: built for another torch
        raise DataError(f"torchvision cannot be imported ({error})") from error
    return MNIST


def prepare_mnist(root: Path, download: bool) -> None:
    """Downloads or unpacks MNIST's files to the folder from which torchvision reads."""
    raw = root / "MNIST" / "raw"
    try:
        if download:
            import_mnist()(root, download=True)
        for path in (raw / name for name in MNIST_FILES):
            packed = path.with_name(f"{path.name}.gz")
            if not path.exists() and packed.exists():
                with replacing(path) as part, gzip.open(packed) as source, part.open("wb") as out:
                    shutil.copyfileobj(source, out)
            elif not path.exists():
                raise DataError(f"MNIST files not found in {root}")
    except (OSError, EOFError, RuntimeError, zlib.error) as error:
        raise DataError(f"MNIST in {root}: {error}") from error
    import_mnist()


def looked_for(root: Path) -> str:
    return (
        f"Looked for {MNIST_FILES[0]} and three others, packed (.gz) or not, in "
        f"{root / 'MNIST' / 'raw'}. Pass the files' folder with --data-root, fetch the files with "
        "--download, or train on other data with --data digits"
    )


def choose_data(args: argparse.Namespace) -> tuple[str, str]:
    """Returns the data to load ("mnist" or "digits"), and their source or the reason for them."""
    source = ""
    if args.data != "digits":
        try:
            prepare_mnist(args.data_root, args.download)
            return "mnist", f" from {args.data_root}"
        except DataError as error:
            if args.data == "mnist" or args.download:
                raise DataError(f"{error}. {looked_for(args.data_root)}") from error
            source = f": {error}"
    if importlib.util.find_spec("sklearn") is None:
        raise DataError(
            "without MNIST, the data are scikit-learn's digits, and scikit-learn is not installed: "
            'pip install ".[examples]"'
        )
    return "digits", source


def load_mnist(root: Path, train: bool) -> TensorDataset:
    # Convert all samples to tensors once: decoding and normalising sample by sample would take
    # longer than the training.
    mnist = import_mnist()(root, train=train)
    images = (mnist.data.float() / 255 - 0.1307) / 0.3081
    return TensorDataset(images.unsqueeze(1), mnist.targets)


def load_digits() -> tuple[TensorDataset, TensorDataset]:
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


def load_data(args: argparse.Namespace) -> Data:
    # Only rank 0 looks for the files, unpacks and downloads, and the other ranks take its answer.
    # If each rank looked for itself, ranks could train on different data, or read a file that
    # another rank is still writing.
    look = functools.partial(choose_data, args) if dist.get_rank() == 0 else lambda: None
    answer: list[Any] = [on_all_ranks(look)]
    dist.broadcast_object_list(answer)
    kind, source = answer[0]
    if kind == "mnist":
        train, test = (load_mnist(args.data_root, train=train) for train in (True, False))
        return Data("MNIST", source, train, test)
    return Data("scikit-learn digits, enlarged to 28x28", source, *load_digits())
