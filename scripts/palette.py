"""The colours of all figures, docs/step.svg included: one colour means one thing everywhere."""

COLOURS = {
    # What a rank holds.
    "this rank's parameters": "#1f77b4",
    "optimizer state": "#ff7f0e",
    "gradients": "#2ca02c",
    "unsharded parameters": "#d62728",
    "activations": "#9467bd",
    # What a rank does.
    "forward": "#7f7f7f",
    "backward": "#c7c7c7",
    "all-gather": "#e377c2",
    "reduce-scatter": "#17becf",
    # What trains the model.
    "DDP": "#8c564b",
    "flatshard": "#111111",
    "flatshard, sockets": "#4d4d4d",
    "flatshard, native": "#8a8a8a",
    "FSDP1": "#bcbd22",
    "FSDP2": "#dbdb8d",
    "no communication": "#c49c94",
}

PEAK = {"color": "#ececec", "hatch": "///", "edgecolor": "#8a8a8a", "linewidth": 0}
"""What a step needs on top of persistent memory, where it is not told apart."""
