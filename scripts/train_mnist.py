"""Trains the MNIST network with its parameters sharded over the ranks.

    torchrun --standalone --nproc-per-node 2 scripts/train_mnist.py

With a GPU for every local rank, the ranks use GPUs and NCCL. Otherwise they use the CPU and gloo.
The data are MNIST if `--data-root` has MNIST's files, and otherwise scikit-learn's handwritten
digits. `--ddp` trains the same job under DistributedDataParallel, for comparison.

    torchrun --standalone --nproc-per-node 2 --max-restarts 3 \\
        scripts/train_mnist.py --checkpoint-dir D --resume

saves in D and on SIGTERM, and resumes after a rank has died, also on another number of ranks.
"""

import argparse
import functools
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lib import mnist_data, training_job
from lib.rank_memory import memory_of_ranks
from lib.training_job import mean_over_ranks, rows_per_rank, say, share_of_rank
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from flatshard import CPUOffload, ShardedWrapper
from flatshard.wrap import size_based_auto_wrap_policy

TEST_BATCH = 1000  # samples per evaluation step, over all ranks


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = training_job.make_parser(__doc__)
    add = parser.add_argument
    add("--data", choices=["auto", "mnist", "digits"], default="auto")
    add("--data-root", type=Path, default=Path("data"), help="MNIST is in ROOT/MNIST/raw")
    add("--download", action="store_true", help="download MNIST to the data root")
    add("--epochs", type=int, default=10)
    add("--batch-size", type=int, default=128, help="samples per step, over all ranks")
    add("--lr", type=float, default=1.0, help="learning rate of Adadelta")
    add("--gamma", type=float, default=0.7, help="factor of the learning rate after each epoch")
    add("--seed", type=int, default=1, help="seed of weights, data and dropout")
    add("--min-num-params", type=int, default=20_000, help="size of a unit; 0: a single unit")
    add("--cpu-offload", action="store_true", help="keep shards in CPU memory")
    add("--offload-path", metavar="DIR", help="keep shards in files in DIR")
    args = parser.parse_args(arguments)
    if args.ddp and (args.cpu_offload or args.offload_path):
        parser.error("--cpu-offload and --offload-path are for sharded parameters: remove --ddp")
    return args


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = self.dropout1(F.max_pool2d(x, 2))
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return F.log_softmax(self.fc2(self.dropout2(x)), dim=1)


def wrap_model(model: nn.Module, args: argparse.Namespace, device: torch.device) -> nn.Module:
    if args.ddp:
        return nn.parallel.DistributedDataParallel(model.to(device), gradient_as_bucket_view=True)
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=args.min_num_params)
    return ShardedWrapper(
        model,
        sharding_strategy=args.strategy,
        auto_wrap_policy=policy if args.min_num_params else None,
        cpu_offload=CPUOffload(offload_params=args.cpu_offload, path=args.offload_path),
        collectives=args.collectives,
        device_id=device if device.type == "cuda" else None,
    )


@torch.no_grad()
def evaluate(model: nn.Module, dataset: TensorDataset, device: torch.device) -> tuple[float, int]:
    """Returns the average loss and the number of correct answers. Collective."""
    model.eval()
    images, labels = dataset.tensors
    totals = torch.zeros(2, dtype=torch.double, device=device)
    size = TEST_BATCH // dist.get_world_size()
    for batch, is_counted in share_of_rank(len(labels), size):
        real = is_counted.to(device)
        output, target = model(images[batch].to(device)), labels[batch].to(device)
        totals[0] += F.nll_loss(output, target, reduction="none")[real].sum()
        totals[1] += (output.argmax(dim=1) == target)[real].sum()
    dist.all_reduce(totals)
    model.train()
    return totals[0].item() / len(labels), int(totals[1])


def batches_of(epoch: int, num_samples: int, args: argparse.Namespace) -> tuple[Tensor, ...]:
    """Returns the indices of this rank's samples, for each step of an epoch."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    order = torch.randperm(num_samples, generator=torch.Generator().manual_seed(args.seed + epoch))
    # Fewer than world_size samples of an epoch are left out, and none is repeated. So a step has
    # the same samples on any number of ranks.
    mine = order[rank : num_samples - num_samples % world_size : world_size]
    return mine.split(rows_per_rank(args.batch_size))


def train(args: argparse.Namespace, device: torch.device) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    name, (train_set, test_set) = mnist_data.load(args.data, args.data_root, args.download)
    say(f"Data: {name} ({len(train_set):,} / {len(test_set):,})")
    torch.manual_seed(args.seed)  # the same weights on every rank
    model = wrap_model(Net(), args, device)
    say(model)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=args.gamma)
    checkpoints = training_job.Checkpoints(args, model, optimizer, scheduler=scheduler)
    state = {"step_losses": [], "epochs": [], "steps_of_epoch": 0, **checkpoints.resume()}
    losses, epochs = state["step_losses"], state["epochs"]

    while len(epochs) < args.epochs:
        start, epoch = time.perf_counter(), len(epochs) + 1
        batches = batches_of(epoch, len(train_set), args)
        for batch in batches[state["steps_of_epoch"] :]:
            # Dropout depends only on seed, step and rank, also after a resume.
            torch.manual_seed(args.seed + 1 + len(losses) * world_size + rank)
            images, labels = (part.to(device) for part in train_set[batch])
            optimizer.zero_grad()
            loss = F.nll_loss(model(images), labels, reduction="sum")
            # The ranks average gradients. The factor turns the average into the gradients of the
            # sum over all ranks' samples. The loss is a sum, not a mean: with the far smaller
            # gradients of a mean, Adadelta's epsilon is no longer negligible and makes the steps
            # smaller.
            (loss * world_size).backward()
            optimizer.step()
            # In a step, the batches of all ranks have the same length.
            losses.append(mean_over_ranks(loss.detach() / len(batch)))
            state["steps_of_epoch"] += 1
            if state["steps_of_epoch"] < len(batches):
                checkpoints.after_step(len(losses), state)
        state["steps_of_epoch"] = 0
        scheduler.step()
        test_loss, correct = evaluate(model, test_set, device)
        result = {
            "epoch": epoch,
            "train_loss": np.average(losses[-len(batches) :], weights=[*map(len, batches)]),
            "test_loss": test_loss,
            "correct": correct,
            "accuracy": 100 * correct / len(test_set),
            # All ranks save the same number.
            "seconds": mean_over_ranks(torch.tensor(time.perf_counter() - start, device=device)),
        }
        epochs.append(result)
        say(f"Train Epoch: {epoch} \tLoss: {result['train_loss']:.6f}")
        say(
            f"Test set: Average loss: {test_loss:.4f}, Accuracy: {correct}/{len(test_set)} "
            f"({result['accuracy']:.2f}%)"
        )
        checkpoints.after_step(len(losses), state)

    results = {"step_losses": losses, "epochs": epochs, "memory": memory_of_ranks(model, optimizer)}
    about = {"data": name, "train_samples": len(train_set), "test_samples": len(test_set)}
    training_job.write_json(args, **about, **results)


if __name__ == "__main__":
    train(parse_args(), training_job.connect())
    dist.destroy_process_group()
