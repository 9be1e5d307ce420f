"""Train a small classifier with DistributedDataParallel, as public scripts do.

    torchrun --nproc_per_node=2 tests/examples/ddp_example.py --out run

The test of this script changes the line that imports DDP and nothing else. The data is made from a
fixed seed. One thing is said for both: every rank calls ``state_dict()``, and rank 0 saves it.
"""

import argparse
import contextlib
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Net(nn.Module):
    """Two layers with batch norm, and a head that only some epochs use."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.ReLU())
        self.head = nn.Linear(24, 4)
        self.auxiliary = nn.Linear(24, 4)

    def forward(self, x: Tensor, auxiliary: bool = False) -> Tensor:
        x = self.features(x)
        return self.head(x) + self.auxiliary(x) if auxiliary else self.head(x)


def make_data(seed: int, rows: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 12, generator=generator)
    return TensorDataset(x, x[:, :4].argmax(dim=1))


def make_loader(data: TensorDataset, args: argparse.Namespace, shuffle: bool) -> DataLoader:
    return DataLoader(
        data,
        batch_size=args.batch_size,
        shuffle=False,
        sampler=DistributedSampler(data, shuffle=shuffle, seed=args.seed),
    )


class Trainer:
    """Epochs, gradient accumulation, evaluation and checkpoints."""

    def __init__(self, args: argparse.Namespace, model: nn.Module, device: torch.device) -> None:
        self.args, self.device = args, device
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.train_loader = make_loader(make_data(1, 203), args, shuffle=True)
        self.test_loader = make_loader(make_data(2, 64), args, shuffle=False)
        self.model = DDP(
            model.to(device),
            device_ids=[device.index] if device.type == "cuda" else None,
            find_unused_parameters=True,
        )
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4
        )
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2, gamma=0.5)
        self.scaler = torch.amp.GradScaler(device.type, enabled=args.amp)
        self.losses: list[float] = []

    def train_epoch(self, epoch: int) -> None:
        self.train_loader.sampler.set_epoch(epoch)
        self.model.train()
        for step, (x, y) in enumerate(self.train_loader):
            x, y = x.to(self.device), y.to(self.device)
            is_last = (step + 1) % self.args.accumulate == 0 or step + 1 == len(self.train_loader)
            context = contextlib.nullcontext() if is_last else self.model.no_sync()
            with context:
                with torch.autocast(self.device.type, enabled=self.args.amp):
                    loss = F.cross_entropy(self.model(x, auxiliary=epoch % 2 == 1), y)
                self.scaler.scale(loss / self.args.accumulate).backward()
            self.losses.append(self.average(loss.detach()))
            if is_last:
                self.scaler.unscale_(self.optimizer)
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip)
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.optimizer.zero_grad(set_to_none=True)
        self.scheduler.step()

    def average(self, value: Tensor) -> float:
        total = value.clone()
        dist.all_reduce(total)
        return total.item() / self.world_size

    @torch.no_grad()
    def evaluate(self) -> list[float]:
        """Loss and accuracy over all ranks' rows."""
        self.model.eval()
        sums = torch.zeros(3, device=self.device)
        for x, y in self.test_loader:
            x, y = x.to(self.device), y.to(self.device)
            output = self.model(x)
            sums[0] += F.cross_entropy(output, y, reduction="sum")
            sums[1] += (output.argmax(dim=1) == y).sum()
            sums[2] += len(y)
        dist.all_reduce(sums)
        return [(sums[0] / sums[2]).item(), (sums[1] / sums[2]).item()]

    def save(self, path: Path) -> None:
        state = self.model.module.state_dict()
        if self.rank == 0:
            torch.save({"model": state, "scheduler": self.scheduler.state_dict()}, path)
        dist.barrier()

    def load(self, path: Path) -> None:
        checkpoint = torch.load(path, map_location=self.device)
        self.model.module.load_state_dict(checkpoint["model"])
        self.scheduler.load_state_dict(checkpoint["scheduler"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--clip", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--dist-url", default="env://")
    parser.add_argument("--out", type=Path, default=Path("ddp-run"))
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=args.dist_url,
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.manual_seed(args.seed)
    args.out.mkdir(exist_ok=True, parents=True)

    trainer = Trainer(args, Net(), device)
    best = float("inf")
    evaluations = []
    for epoch in range(args.epochs):
        trainer.train_epoch(epoch)
        evaluations.append(trainer.evaluate())
        if evaluations[-1][0] < best:
            best = evaluations[-1][0]
            trainer.save(args.out / "checkpoint.pt")
    trainer.load(args.out / "checkpoint.pt")
    evaluations.append(trainer.evaluate())
    if trainer.rank == 0:
        curves = {"losses": trainer.losses, "evaluations": evaluations}
        (args.out / "curves.json").write_text(json.dumps(curves))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
