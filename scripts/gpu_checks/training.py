"""Models and training steps that several parts use."""

import torch
import torch.distributed as dist
from benchmark import make_batch
from lib.gpt import GPT, Block, Preset, loss_of

from flatshard import MixedPrecision, ShardedWrapper
from flatshard.wrap import ModuleWrapPolicy

SMALL = Preset(layers=2, width=64, heads=4, vocabulary=128, sequence=16)
BILLION = Preset(layers=24, width=1792, heads=14, vocabulary=32768, sequence=1024, batch=4)
MEDIUM = Preset(layers=8, width=2048, heads=16, vocabulary=8192, sequence=1024, batch=4)
WARMUP = 2


def build_gpt(preset: Preset, device: torch.device) -> GPT:
    """Build the model directly on `device`: a CPU would take long to draw a billion numbers."""
    torch.manual_seed(0)
    with device:
        return GPT(preset)


class Stepper:
    """A wrapped GPT, trained one step per call of `step`."""

    def __init__(
        self, preset: Preset, rank: int, device: torch.device, group: dist.ProcessGroup | None
    ) -> None:
        self.model = ShardedWrapper(
            build_gpt(preset, device),
            process_group=group,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            mixed_precision=MixedPrecision(torch.bfloat16, torch.float32),
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.batch = make_batch(preset, rank, device)

    def step(self) -> None:
        loss_of(self.model(self.batch[:, :-1]), self.batch).backward()
        self.model.clip_grad_norm_(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
