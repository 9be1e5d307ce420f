"""Train a small language model with FullyShardedDataParallel, as public scripts do.

    torchrun --nproc_per_node=2 tests/examples/fsdp_example.py --out run

The test of this script changes the line that imports FSDP and nothing else. The data is made from a
fixed seed.
"""

import argparse
import functools
import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

VOCABULARY, WIDTH, LENGTH = 17, 16, 8
Block = nn.TransformerEncoderLayer


class LanguageModel(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(
            Block(WIDTH, 2, 64, dropout=0.0, batch_first=True, bias=False) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position
        for block in self.blocks:
            x = block(x, self.mask)
        return self.head(x)


def make_data(rows: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    start = torch.randint(VOCABULARY, (rows, 1), generator=generator)
    step = torch.randint(1, 4, (rows, 1), generator=generator)
    return TensorDataset((start + step * torch.arange(LENGTH + 1)) % VOCABULARY)


def wrap(model: nn.Module, args: argparse.Namespace) -> FSDP:
    if args.wrap == "size":
        policy = functools.partial(size_based_auto_wrap_policy, min_num_params=1500)
    else:
        policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    return FSDP(
        model,
        auto_wrap_policy=policy,
        mixed_precision=MixedPrecision(reduce_dtype=torch.float32),
        sharding_strategy=ShardingStrategy[args.strategy],
        cpu_offload=CPUOffload(offload_params=False),
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        device_id=torch.device("cpu"),
        limit_all_gathers=True,
        use_orig_params=args.use_orig_params,
    )


def train_epoch(
    model: FSDP, loader: DataLoader, optimizer: torch.optim.Optimizer
) -> list[list[float]]:
    """The average loss over ranks, and the gradients' norm, of every step."""
    model.train()
    rows = []
    for (tokens,) in loader:
        optimizer.zero_grad()
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        norm = model.clip_grad_norm_(0.5)
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        rows.append([total.item() / dist.get_world_size(), norm.item()])
    return rows


def save(model: FSDP, optimizer: torch.optim.Optimizer, path: Path, offload: bool) -> None:
    model_config = FullStateDictConfig(offload_to_cpu=offload, rank0_only=True)
    optim_config = FullOptimStateDictConfig(offload_to_cpu=offload, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, model_config, optim_config):
        state = model.state_dict()
        optim_state = FSDP.optim_state_dict(model, optimizer)
    if dist.get_rank() == 0:
        torch.save({"model": state, "optimizer": optim_state}, path)
    dist.barrier()


def load(model: FSDP, optimizer: torch.optim.Optimizer, path: Path) -> None:
    checkpoint = torch.load(path, map_location="cpu")
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        model.load_state_dict(checkpoint["model"])
        state = FSDP.optim_state_dict_to_load(model, optimizer, checkpoint["optimizer"])
    optimizer.load_state_dict(state)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="FULL_SHARD")
    parser.add_argument("--wrap", choices=["size", "transformer"], default="size")
    parser.add_argument("--use-orig-params", action="store_true")
    parser.add_argument("--checkpoint-activations", action="store_true")
    parser.add_argument("--no-offload", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("fsdp-run"))
    args = parser.parse_args()

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    args.out.mkdir(exist_ok=True, parents=True)

    data = make_data(96)
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = wrap(LanguageModel(), args)
    if args.checkpoint_activations:
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)

    steps = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        steps += train_epoch(model, loader, optimizer)
        scheduler.step()
    with FSDP.summon_full_params(model, writeback=False):
        norms = [param.norm().item() for param in model.parameters()]
    save(model, optimizer, args.out / "checkpoint.pt", offload=not args.no_offload)
    steps += train_epoch(model, loader, optimizer)
    load(model, optimizer, args.out / "checkpoint.pt")
    again = train_epoch(model, loader, optimizer)
    if dist.get_rank() == 0:
        units = len(FSDP.fsdp_modules(model))
        curves = {"steps": steps, "again": again, "norms": norms, "units": units}
        (args.out / "curves.json").write_text(json.dumps(curves))


if __name__ == "__main__":
    main()
