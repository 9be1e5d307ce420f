"""``PipelineStage``: torch's, for a stage that is a ``ShardedWrapper``."""

from __future__ import annotations

from typing import Any

from torch.distributed.pipelining import PipelineStage as TorchStage

from flatshard.module.run import plan_backward
from flatshard.wrapper import ShardedWrapper


class PipelineStage(TorchStage):
    """``torch.distributed.pipelining.PipelineStage`` that reduces once in a step of its schedule.

    torch's own knows DistributedDataParallel and FSDP2 only: a ``ShardedWrapper`` in it reduces in
    the backward of every micro-batch, with the same result. Here the backwards but the last one of
    a step accumulate full gradients, as under ``ShardedWrapper.no_sync``. Arguments are torch's;
    other modules are left to it.

    Collective: as the schedule's, all ranks of the pipeline and of the wrapper.
    """

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """Run a micro-batch's backward. NotImplementedError for schedules that split it in two."""
        model = self.submod
        if isinstance(model, ShardedWrapper):
            if backward_type != "full":
                raise NotImplementedError(
                    f"stage {self.stage_index}: the schedule splits backwards (zero bubble), where "
                    "a ShardedWrapper cannot tell which gradients are to come. Use ScheduleGPipe, "
                    "Schedule1F1B or ScheduleInterleaved1F1B."
                )
            plan_backward(model, reduces=last_backward)
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
