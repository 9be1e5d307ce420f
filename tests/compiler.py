"""Imports what `torch.compile` imports when it first compiles; for the ``preload`` of `run_ranks`.

Otherwise each rank that compiles computes for seconds before it has imported the compiler.
"""

import warnings

import torch
from torch import nn

# Without gradients: after a backward, autograd refuses to run in a forked process.
with warnings.catch_warnings(action="ignore"), torch.no_grad():  # the compiler's own
    model = nn.Linear(2, 2)
    for backend in ("eager", "aot_eager"):
        torch.compile(model, backend=backend)(torch.ones(2, 2))
        torch.compiler.reset()
del model
