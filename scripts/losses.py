"""Prints the losses of short trainings to the last bit, one line for each setting.

torchrun --standalone --nproc-per-node 2 scripts/losses.py > losses.txt

To check that two commits compute the same, run the script in both and compare the files with
`diff`. The script trains a small GPT in float32 with SGD and momentum, its head tied to its
embedding, for each strategy, transport, precision and policy.
"""

import functools
import os
import warnings
from typing import Any

import torch
import torch.distributed as dist
from lib.command_line import Parser, stop
from lib.gpt import GPT, Block, Preset, loss_of

from flatshard import CPUOffload, MixedPrecision, ShardedWrapper, ShardingStrategy
from flatshard.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy

STEPS, BATCH = 4, 4
SHAPE = Preset(layers=4, width=48, heads=4, vocabulary=97, sequence=16)
BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

WAYS: dict[str, Any] = {one.name: {"sharding_strategy": one.name} for one in ShardingStrategy}
WAYS |= {
    "FULL_SHARD, k=2": {"reshard_after_forward": 2},
    "sockets": {"collectives": "sockets"},
    "native": {"collectives": "native"},
    "bf16": {"mixed_precision": BF16},
    "bf16, native": {"mixed_precision": BF16, "collectives": "native"},
    "bf16 wire": {"collectives": "sockets", "wire_dtype": torch.bfloat16},
    "fixed order": {"mixed_precision": MixedPrecision(reduce_mode="fixed_order")},
    "offload": {"cpu_offload": CPUOffload(offload_params=True)},
    "one unit a layer": {"coalesce_bytes": 0},
    "auto": {"auto_wrap_policy": "auto"},
    "by size": {
        "auto_wrap_policy": functools.partial(size_based_auto_wrap_policy, min_num_params=5000)
    },
}


def losses(accumulate: bool, in_backward: bool, **settings: object) -> list[float]:
    torch.manual_seed(0)
    plain = GPT(SHAPE)
    plain.head.weight = plain.tokens.weight
    keywords = {"auto_wrap_policy": ModuleWrapPolicy({Block}), **settings}
    model = ShardedWrapper(plain, **keywords)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if in_backward:
        model.step_in_backward(optimizer)
    torch.manual_seed(1 + dist.get_rank())
    found = []
    for _ in range(STEPS):
        words = torch.randint(SHAPE.vocabulary, (BATCH, SHAPE.sequence + 1))
        optimizer.zero_grad()
        if accumulate:
            with model.no_sync():
                loss_of(model(words[:, :-1]), words).backward()
        loss = loss_of(model(words[:, :-1]), words)
        loss.backward()
        if not in_backward:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append(float(loss.detach()))
    found.append(float(sum(value.double().sum() for value in model.state_dict().values())))
    return found


def main() -> None:
    Parser(__doc__).parse_args()
    if "RANK" not in os.environ:
        stop("start this script with torchrun --standalone --nproc-per-node 2")
    dist.init_process_group("gloo")
    # HYBRID strategies take half of the ranks for a node.
    os.environ["LOCAL_WORLD_SIZE"] = str(max(1, dist.get_world_size() // 2))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name, settings in WAYS.items():
        for accumulate, in_backward in ((False, False), (True, False), (False, True)):
            mine = losses(accumulate, in_backward, **settings)
            everyone: list[object] = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, [value.hex() for value in mine])
            if dist.get_rank() == 0:
                mode = "accumulated" if accumulate else "in backward" if in_backward else "plain"
                print(f"{name} | {mode} | {everyone}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
