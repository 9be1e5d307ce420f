"""``plan`` and ``TrainingPlan``: a table of strategies, code for the best strategy, and advice."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flatshard.extras.plan.hardware import DEVICES, Device, Machine, amount, show
from flatshard.extras.plan.models import Step, read_spec
from flatshard.extras.plan.planning import STRATEGIES, Choice, Target, choices
from flatshard.module.unit_report import tabulate

# Categories of memory in the order of the plot: constant categories are at the bottom.
_PLOTTED = (
    *("parameters", "optimizer", "buffers", "gradients", "activations", "reduction"),
    *("unsharded", "temporary"),
)
# Categories of memory in the order of the table. All other categories count as temporary.
_CATEGORIES = ("parameters", "gradients", "optimizer", "unsharded", "activations")


@dataclass(frozen=True)
class TrainingPlan:
    """Predictions for all strategies. ``str()`` returns a table, the code to paste, and advice.

    Attributes:
        name: name of the model.
        target: the machine and the settings.
        choices: one prediction for each strategy and number of ranks.
        container: name of the module that contains the repeated blocks.
        changes: predictions that each change one setting, keyed by a text that describes the
            change; empty if a strategy fits.
    """

    name: str
    target: Target
    choices: Sequence[Choice]
    container: str = ""
    changes: dict[str, Choice] = dataclasses.field(default_factory=dict)

    @property
    def best(self) -> Choice | None:
        """The fitting choice with most samples per second and rank; None if nothing fits."""
        fitting = [one for one in self.choices if one.fits]
        # If speeds differ by less than 1 %, prefer fewer ranks, and then simpler strategies.
        fastest = max((one.samples_per_second for one in fitting), default=0)
        return next((one for one in fitting if one.samples_per_second > 0.99 * fastest), None)

    def to_dict(self) -> dict[str, Any]:
        """Return all figures as a dict for JSON: bytes, seconds, and bytes sent in a step."""
        best = self.best
        return {
            "name": self.name,
            "choices": [_figures(one) for one in self.choices],
            "best": None if best is None else _figures(best),
            "changes": {change: _figures(one) for change, one in self.changes.items()},
            "code": self.code(),
        }

    def code(self) -> str:
        """Python code that trains with the best choice; empty if nothing fits."""
        best = self.best
        if best is None:
            return ""
        param_dtype, policy = self.target.precision.param_dtype, self.target.auto_wrap_policy
        keywords = [
            f"auto_wrap_policy={policy!r}" if policy == "auto" else "auto_wrap_policy=policy"
        ]
        keywords.append(f"sharding_strategy={best.strategy!r}")
        if param_dtype is not None:
            keywords.append(f"mixed_precision=MixedPrecision({param_dtype}, torch.float32)")
        lines = ["import torch", "from flatshard import MixedPrecision, ShardedWrapper", ""]
        if best.checkpoint != "none":
            lines = ["from functools import partial", *lines[:2]]
            lines.append("from torch.utils.checkpoint import checkpoint")
            context = ""
            if best.checkpoint == "selective":
                lines.append("from flatshard.memory_plan import selective_contexts")
                context = ", context_fn=selective_contexts"
            lines += [
                "",
                f"for block in model.get_submodule({self.container!r}).children():",
                "    block.forward = partial(",
                f"        checkpoint, block.forward, use_reentrant=False{context}",
                "    )",
            ]
        return "\n".join([*lines, f"model = ShardedWrapper(model, {', '.join(keywords)})"])

    def plot(self, path: str) -> None:
        """Plot memory over a step of the best choice, and speed against memory of all choices.

        Raises ImportError if matplotlib is not installed.
        """
        from flatshard.extras.recording.memory_timeline import matplotlib

        figure = matplotlib().Figure(figsize=(11, 4), layout="constrained")
        over, frontier = figure.subplots(1, 2)
        shown = self.best or min(self.choices, key=lambda one: one.outcome.peak_bytes)
        times = [1000 * seconds for seconds, _ in shown.outcome.timeline]
        held = [totals for _, totals in shown.outcome.timeline]
        kinds = [kind for kind in _PLOTTED if any(totals.get(kind) for totals in held)]
        rows = [[totals.get(kind, 0) / 1e9 for totals in held] for kind in kinds]
        over.stackplot(times, rows, labels=kinds, step="post")
        over.set(title=f"{shown.strategy}, {shown.ranks} ranks", xlabel="ms", ylabel="GB")
        over.legend(fontsize=7, loc="upper left")
        for strategy in dict.fromkeys(one.strategy for one in self.choices):
            same = [one for one in self.choices if one.strategy == strategy]
            points = [(one.outcome.peak_bytes / 1e9, one.samples_per_second) for one in same]
            frontier.plot(*zip(*points, strict=True), "o-", label=strategy)
            for one, point in zip(same, points, strict=True):
                text = f"{one.ranks}{'' if one.fits else ', too large'}"
                frontier.annotate(text, point, (4, 4), textcoords="offset points", fontsize=7)
        frontier.set(title="ranks", xlabel="peak, GB", ylabel="samples per second and rank")
        frontier.legend(fontsize=7)
        figure.savefig(path, dpi=150)

    def __str__(self) -> str:
        best = self.best
        lines = [
            f"{self.name}, batch {self.target.batch} per rank. Parameters, gradients, optimizer: "
            "bytes between steps. Unsharded, activations, temporary: bytes at the peak. Reserved: "
            "bytes that torch's allocator takes from the device, freed blocks included.",
            tabulate([_HEADER, *map(_row, self.choices)], numbers=range(2, 15)),
        ]
        if best is not None:
            what = f"{best.strategy} on {best.ranks} ranks"
            lines += [f"Cheapest that fits: {what}. {_peak(best)}", "", self.code()]
            return "\n".join(lines)
        closest = min(self.choices, key=lambda one: one.outcome.peak_bytes)
        device = show(self.target.machine.device.memory_bytes)
        lines.append(
            f"Nothing fits into {device}. {closest.strategy} on {closest.ranks} ranks needs least. "
            f"{_peak(closest)} What to change:"
        )
        for change, one in self.changes.items():
            fits = "fits" if one.fits else "does not fit"
            peak = show(one.outcome.peak_bytes)
            lines.append(f"- {change}: {peak} with {one.strategy} on {one.ranks} ranks, {fits}")
        return "\n".join(lines)


def stages(numel: float, ranks: Sequence[int]) -> str:
    """Return a table of the persistent memory by ZeRO's formulas (arXiv 1910.02054), in GB.

    For each element, mixed precision keeps 2 bytes of the parameter, 2 bytes of the gradient, and
    12 bytes of the float32 weight and AdamW's two averages. The last row is training in float32,
    without gradients: 4 bytes of the parameter and 8 bytes of the averages.
    """
    rows = [("stage", "sharded", *(f"{n} ranks" for n in ranks))]
    for stage, what, whole, split in (
        ("0", "nothing", 16, 0),
        ("1", "optimizer", 4, 12),
        ("2", "optimizer, gradients", 2, 14),
        ("3", "optimizer, gradients, parameters", 0, 16),
        ("3", "float32 parameters, optimizer", 0, 12),
    ):
        sizes = (numel * (whole + split / n) / 1e9 for n in ranks)
        rows.append((stage, what, *(f"{size:,.1f} GB" for size in sizes)))
    return tabulate(rows, numbers=range(2, 2 + len(ranks)))


_HEADER = (
    *("ranks", "strategy", *_CATEGORIES, "temporary", "peak", "reserved"),
    *("sent in node", "sent across", "step", "samples/s", "bound by", "fits"),
)


def _row(one: Choice) -> tuple[str, ...]:
    outcome = one.outcome
    at_peak = [outcome.peak.get(kind, 0) for kind in _CATEGORIES]
    held = [one.persistent.get(kind, held) for kind, held in zip(_CATEGORIES, at_peak, strict=True)]
    rest = outcome.peak_bytes - sum(at_peak)
    sizes: list[float] = [*held, rest, outcome.peak_bytes, outcome.reserved_bytes]
    sizes += outcome.sent_bytes
    return (
        *(str(one.ranks), one.strategy, *map(show, sizes)),
        *(f"{1000 * outcome.seconds:,.0f} ms", f"{one.samples_per_second:,.2f}"),
        *(one.bound, "yes" if one.fits else "no"),
    )


def _peak(one: Choice) -> str:
    return f"Its peak of {show(one.outcome.peak_bytes)} is in {one.outcome.peak_at}."


def _figures(one: Choice) -> dict[str, Any]:
    outcome = dataclasses.asdict(one.outcome)
    del outcome["timeline"]
    fields = (
        "strategy",
        "ranks",
        "checkpoint",
        "batch",
        "persistent",
        "fits",
        "samples_per_second",
        "bound",
    )
    own = {name: getattr(one, name) for name in fields}
    return {**own, **outcome, "peak_bytes": one.outcome.peak_bytes}


def counts(ranks: int | str | Sequence[int]) -> tuple[int, ...]:
    """Return numbers of ranks. A text lists numbers (``8,64``), or doubles one (``8..64``)."""
    if not isinstance(ranks, str):
        return (ranks,) if isinstance(ranks, int) else tuple(ranks)
    first, dots, last = ranks.partition("..")
    try:
        if not dots:
            return tuple(int(one) for one in ranks.split(","))
        start, end = int(first), int(last)
    except ValueError:
        raise ValueError(f"ranks: expected 8, 8,64 or 8..64, got {ranks!r}") from None
    if not 0 < start <= end:
        raise ValueError(f"ranks: expected 1 <= first <= last, got {ranks!r}")
    return tuple(start << i for i in range((end // start).bit_length()))


def plan(
    spec: Callable[[], Any] | str,
    *,
    step: Step | None = None,
    ranks: int | str | Sequence[int] = 8,
    per_node: int = 8,
    device: str | Device = "h100",
    memory: float | str | None = None,
    flops: float | str | None = None,
    link: float | str = 50e9,
    node_link: float | str = 450e9,
    batch: int = 1,
    seq: int = 2048,
    strategy: str | Sequence[str] = STRATEGIES,
    **settings: Any,
) -> TrainingPlan:
    """Predict memory, communication and time of training a model, for each sharding strategy.

    One forward and backward of the model runs on fake tensors, which have no memory. The prediction
    needs no process group, no GPU, and does not communicate. The options of the command
    ``flatshard plan`` have the names of the keywords.

    Example:
        ```python
        import flatshard

        def step(model):
            return loss_fn(model(inputs), labels)

        print(flatshard.plan(Model, step=step, ranks=[8, 64], memory="80GB"))
        ```

    Args:
        spec: a function that returns the model, or a tuple of the model and its ``step``.
            ``plan`` calls the function under ``torch.device("meta")``, where tensors have no
            memory. Instead of a function: the name of a preset (``"llama3-8b"``), the path of a
            Hugging Face ``config.json``, or ``"package.module:function"``.
        step: a function that gets the model, runs a forward and returns the loss. None: the model
            is a language model, which takes token ids of shape ``(batch, seq)``.
        ranks: numbers of ranks to compare; ``"8..64"`` doubles 8 up to 64.
        per_node: number of ranks in one node.
        device: name of a device, such as ``"h100"``, or a ``Device`` with the speeds.
        memory: bytes of memory per device, or a text such as ``"80GB"`` (powers of 1000) or
            ``"80GiB"``. None: the memory of ``device``.
        flops: sustained floating point operations per second of matrix products, such as
            ``"600T"``. None: the speed of ``device``.
        link: one rank's share of the bytes per second that its node sends to other nodes.
        node_link: bytes per second that one rank sends within a node.
        batch: number of sequences per rank in one forward.
        seq: number of tokens per sequence.
        strategy: names of the sharding strategies to compare.
        settings: ``dtype`` (``"bf16"``, ``"fp16"``, ``"fp32"`` or a ``MixedPrecision``),
            ``optimizer`` (``"adamw"``, ``"sgd"``, ... or the bytes of state per element),
            ``checkpoint`` (``"none"``, ``"block"`` or ``"selective"``), ``compile``, ``accumulate``
            (backwards per step) and ``auto_wrap_policy``.

    Raises:
        CannotTraceError: the model's forward needs real values.
        ValueError: the name of the model or device is unknown, a number is too small, or one unit
            alone needs more than ``memory`` under every strategy.
        TypeError: ``step`` is None, and the model does not return logits; or ``step`` does not
            return a loss.
    """
    numbers = counts(ranks)
    least = {"batch": batch, "seq": seq, "per_node": per_node, "ranks": min(numbers)}
    for name, value in least.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}.")
    if isinstance(device, str):
        if device not in DEVICES:
            raise ValueError(f"device {device!r} is not known. Known: {', '.join(DEVICES)}.")
        device = DEVICES[device]
    if memory is not None:
        device = dataclasses.replace(device, memory_bytes=amount(memory))
    if flops is not None:
        device = dataclasses.replace(device, flops=amount(flops))
    machine = Machine(device, per_node, amount(node_link), amount(link))
    strategies = (strategy,) if isinstance(strategy, str) else strategy
    target = Target(machine, numbers, batch, seq, strategy=strategies, **settings)
    build = read_spec(spec, seq) if isinstance(spec, str) else spec
    found, container = choices(build, step, target)
    name = spec if isinstance(spec, str) else getattr(spec, "__name__", "model")
    made = TrainingPlan(name, target, found, container)
    if made.best is None:
        made = dataclasses.replace(made, changes=_changes(build, step, target))
    return made


def _changes(build: Callable[[], Any], step: Step | None, target: Target) -> dict[str, Choice]:
    """For each change of one setting, return the prediction with the smallest peak."""
    changes: dict[str, dict[str, Any]] = {
        "checkpoint='selective'": {"checkpoint": "selective"},
        "checkpoint='block'": {"checkpoint": "block"},
        f"twice the ranks ({2 * max(target.ranks)})": {"ranks": (2 * max(target.ranks),)},
    }
    if step is None and target.batch > 1:
        changes[f"batch={target.batch // 2}"] = {"batch": target.batch // 2}
    if target.precision.param_dtype is None:
        changes["dtype='bf16'"] = {"dtype": "bf16"}
    if target.checkpoint != "none":
        del changes["checkpoint='selective'"]
    if target.checkpoint == "block":
        del changes["checkpoint='block'"]
    found = {}
    for text, change in changes.items():
        options, _ = choices(build, step, dataclasses.replace(target, **change))
        found[text] = min(options, key=lambda one: one.outcome.peak_bytes)
    return found
