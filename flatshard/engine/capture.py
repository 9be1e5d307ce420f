"""``check_not_captured``: a CUDA graph records kernels, and gathers are more than kernels.

What the host does in a step (which unit is gathered when, where memory is freed, what the ranks say
to one another at the end of backward) runs once, while the graph is captured, and never again.
"""

from __future__ import annotations

import torch


def check_not_captured(device: torch.device) -> None:
    """Refuse to gather or reduce while the current stream is captured.

    Raises:
        RuntimeError: it is.
    """
    # Asked of another device than the current one, torch would begin to use that.
    is_current = device.type == "cuda" and torch.cuda.current_device() == device.index
    if is_current and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "ShardedWrapper: the forward of a sharded model cannot be captured in a CUDA graph: "
            "replays would neither gather parameters nor reduce gradients. Train without the "
            "graph; torch.compile(block) before wrapping makes a block's kernels fewer."
        )
