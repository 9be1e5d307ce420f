"""``PipelineStage``: torch's ``PipelineStage`` for a ``ShardedWrapper``."""

from typing import Any

from torch.distributed.pipelining import PipelineStage as TorchStage

from flatshard.module.run import plan_backward
from flatshard.wrapper import ShardedWrapper


class PipelineStage(TorchStage):
    """``torch.distributed.pipelining.PipelineStage`` that reduces gradients once per step.

    A ``ShardedWrapper`` in torch's ``PipelineStage`` reduces gradients in the backward of every
    micro-batch. In this class, only the last backward of a step reduces gradients; earlier
    backwards accumulate full gradients, as under ``ShardedWrapper.no_sync``. The resulting
    gradients are the same. This class takes the same arguments as torch's class. Modules other than
    ``ShardedWrapper`` are handled as in torch's class.

    Example:
        ```python
        from torch.distributed.pipelining import ScheduleGPipe

        from flatshard.integrations.pipelining import PipelineStage

        mesh = init_device_mesh("cuda", (2, 1), mesh_dim_names=("pp", "dp"))
        number, size = mesh["pp"].get_local_rank(), mesh["pp"].size()
        model = ShardedWrapper(Block(), device_mesh=mesh["dp"])
        group = mesh["pp"].get_group()
        stage = PipelineStage(model, number, size, device, group=group)
        schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=nn.functional.mse_loss)
        rows = (torch.randn(4, 8),) if stage.is_first else ()
        schedule.step(*rows, target=torch.randn(4, 8) if stage.is_last else None)
        ```

    Collective: all ranks of the pipeline and of the wrapper, as in torch's schedules.
    """

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """Run the backward of a micro-batch.

        Raises:
            NotImplementedError: the schedule splits a backward in two (zero bubble).
        """
        model = self.submod
        if isinstance(model, ShardedWrapper):
            if backward_type != "full":
                raise NotImplementedError(
                    f"stage {self.stage_index}: a schedule that splits each backward in two (zero "
                    "bubble) is not supported, because a ShardedWrapper cannot tell when gradients "
                    "are complete. Use ScheduleGPipe, Schedule1F1B or ScheduleInterleaved1F1B."
                )
            plan_backward(model, reduces=last_backward)
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
