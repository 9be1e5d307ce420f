"""``plan`` and ``TrainingPlan``: a table of strategies, code for the best strategy, and advice.

The options of the command ``flatshard plan`` are the keywords of ``plan``.
"""

import argparse
import contextlib
import importlib
import json
import pkgutil
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatshard.extras import tabulate
from flatshard.extras.plan.hardware import DEVICES, Device, Machine, amount, show
from flatshard.extras.plan.replay import Outcome, TracedModel
from flatshard.extras.plan.trace import Build, CannotTraceError, Checkpointing, Step
from flatshard.options.precision import MixedPrecision
from flatshard.units.policies import Policy

STRATEGIES = ("NO_SHARD", "SHARD_OP", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD")
# Bytes of optimizer state per trained element. The state is in float32: AdamW keeps two values.
OPTIMIZERS = {"adamw": 8.0, "adam": 8.0, "sgd": 0.0, "momentum": 4.0, "muon": 4.0, "lion": 4.0}
# Dtypes in which models compute. Gradients are reduced, and optimizers step, in float32.
DTYPES = {
    "bf16": MixedPrecision(torch.bfloat16, torch.float32),
    "fp16": MixedPrecision(torch.float16, torch.float32),
    "fp32": MixedPrecision(),
}
CONTEXT_BYTES = 1.0e9  # memory of the CUDA context and of NCCL, outside of torch's allocator

_CHECKPOINTS = ("none", "selective", "block")
# Options that users choose by name, and the objects that the names stand for.
_NAMES: dict[str, Any] = {"device": DEVICES, "dtype": DTYPES, "optimizer": OPTIMIZERS}
_CHOICES = {**_NAMES, "checkpoint": _CHECKPOINTS, "strategy": STRATEGIES}
# Categories of memory in the order of the table. All other categories count as temporary.
_CATEGORIES = ("parameters", "gradients", "optimizer", "unsharded", "activations")


@dataclass(frozen=True)
class Choice:
    """The prediction for one strategy on one number of ranks.

    Attributes:
        strategy: name of the sharding strategy.
        ranks: number of ranks.
        outcome: the predicted memory, communication and time.
        fits: whether the peak and ``CONTEXT_BYTES`` fit into the device's memory.
    """

    strategy: str
    ranks: int
    outcome: Outcome
    fits: bool

    @property
    def bound(self) -> str:
        """The part of the machine that limits the speed: the link or the computation."""
        # Share of the step in which the device only waits for collectives.
        exposed = 1 - self.outcome.compute_seconds / self.outcome.seconds
        return f"link ({exposed:.0%} exposed)" if exposed > 0.1 else "compute"

    def cells(self) -> dict[str, str]:
        """Return the row of the table, keyed by the titles of the columns."""
        outcome = self.outcome
        sizes: dict[str, float] = {kind: outcome.peak.get(kind, 0) for kind in _CATEGORIES}
        sizes["temporary"] = outcome.peak_bytes - sum(sizes.values())
        sizes |= {**outcome.persistent, "peak": outcome.peak_bytes}
        sizes["sent in node"], sizes["sent across"] = outcome.sent_bytes
        return {
            "ranks": str(self.ranks),
            "strategy": self.strategy,
            **{title: show(nbytes) for title, nbytes in sizes.items()},
            "step": f"{1000 * outcome.seconds:,.0f} ms",
            "bound by": self.bound,
            "fits": "yes" if self.fits else "no",
        }

    def __str__(self) -> str:
        return f"{self.strategy} on {self.ranks} ranks"


@dataclass(frozen=True)
class Target:
    """The model, the machine and the settings of a training run; ``plan`` explains the fields."""

    build: Build
    step: Step | None = None
    ranks: int | str | Sequence[int] = 8
    per_node: int = 8
    device: str | Device = "h100"
    memory: float | str | None = None
    flops: float | str | None = None
    link: float | str = "50GB/s"
    node_link: float | str = "450GB/s"
    batch: int = 1
    seq: int = 2048
    dtype: str | MixedPrecision = "bf16"
    optimizer: str | float = "adamw"
    checkpoint: Checkpointing = "none"
    accumulate: int = 1
    strategy: str | Sequence[str] = STRATEGIES
    auto_wrap_policy: Policy | None = "auto"

    def __post_init__(self) -> None:
        least = {name: getattr(self, name) for name in ("batch", "seq", "per_node", "accumulate")}
        for name, value in {**least, "ranks": min(counts(self.ranks), default=0)}.items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")

    @property
    def machine(self) -> Machine:
        given = {"memory_bytes": self.memory, "flops": self.flops}
        changes: Any = {name: amount(one) for name, one in given.items() if one is not None}
        device = replace(_look_up("device", self.device), **changes)
        return Machine(device, self.per_node, amount(self.node_link), amount(self.link))

    @property
    def precision(self) -> MixedPrecision:
        return _look_up("dtype", self.dtype)  # type: ignore[no-any-return]

    def choices(self) -> list[Choice]:
        """Trace one step, and replay the trace under each strategy on each number of ranks.

        Raises ValueError if no strategy can be used.
        """
        strategies = (self.strategy,) if isinstance(self.strategy, str) else self.strategy
        machine, node, found = self.machine, self.per_node, list[Choice]()
        memory = machine.device.memory_bytes
        traced = TracedModel(
            self.build,
            self.step or language_step(self.batch, self.seq),
            checkpoint=self.checkpoint,
            on_gpu=machine.device.is_gpu,
            auto_wrap_policy=self.auto_wrap_policy,
            mixed_precision=self.precision,
        )
        for ranks, strategy in product(counts(self.ranks), strategies):
            # A hybrid strategy shards within a node, and needs several nodes.
            if strategy.startswith("HYBRID") and (ranks <= node or ranks % node):
                continue
            outcome = traced.replay(
                machine,
                ranks,
                self.accumulate,
                optimizer_bytes=_look_up("optimizer", self.optimizer),
                sharding_strategy=strategy,
                ranks_per_node=min(ranks, node),
            )
            fits = not memory or outcome.peak_bytes + CONTEXT_BYTES <= memory
            found.append(Choice(strategy, ranks, outcome, fits))
        if not found:
            raise ValueError(
                f"{', '.join(strategies)} needs several nodes: expected a multiple of per_node="
                f"{node} ranks, at least {2 * node}, got {list(counts(self.ranks))}."
            )
        return found

    def changes(self) -> dict[str, Choice]:
        """For each change of a setting, predict the strategy with the smallest peak memory."""
        stronger = _CHECKPOINTS[_CHECKPOINTS.index(self.checkpoint) + 1 :]
        changes: list[tuple[str, Any]] = [("checkpoint", kind) for kind in stronger]
        changes.append(("ranks", 2 * max(counts(self.ranks))))
        if self.step is None and self.batch > 1:
            changes.append(("batch", self.batch // 2))
        if self.precision.param_dtype is None:
            changes.append(("dtype", "bf16"))
        found = {}
        for name, value in changes:
            text = f"twice the ranks ({value})" if name == "ranks" else f"{name}={value!r}"
            # Checkpointing fails if a forward changes its inputs, or fills a cache.
            with contextlib.suppress(CannotTraceError):
                found[text] = smallest(replace(self, **{name: value}).choices())
        return found


def _look_up(option: str, value: Any) -> Any:
    """Return the object named by ``value`` if ``value`` is a text, otherwise ``value`` itself."""
    if not isinstance(value, str):
        return value
    if value not in _NAMES[option]:
        raise ValueError(f"{option}: expected {', '.join(_NAMES[option])}, got {value!r}.")
    return _NAMES[option][value]


def smallest(choices: Iterable[Choice]) -> Choice:
    return min(choices, key=lambda one: one.outcome.peak_bytes)


@dataclass(frozen=True)
class TrainingPlan:
    """Predictions for all strategies. ``str()`` returns a table, the code to paste, and advice.

    Attributes:
        name: name of the model.
        target: the machine and the settings.
        choices: one prediction for each strategy and number of ranks.
        changes: predictions that each change one setting, keyed by a text that describes the
            change; empty if a strategy fits.
    """

    name: str
    target: Target
    choices: Sequence[Choice]
    changes: dict[str, Choice] = field(default_factory=dict)

    @property
    def best(self) -> Choice | None:
        """The fitting choice with the shortest step; None if no choice fits."""
        fitting = [one for one in self.choices if one.fits]
        # If durations differ by less than 1 %, prefer fewer ranks, and then simpler strategies.
        shortest = min((one.outcome.seconds for one in fitting), default=0)
        return next((one for one in fitting if 0.99 * one.outcome.seconds < shortest), None)

    def code(self) -> str:
        """Python code that trains with the best choice; empty if nothing fits."""
        best = self.best
        if best is None:
            return ""
        policy, dtype = self.target.auto_wrap_policy, self.target.precision.param_dtype
        keywords = f"auto_wrap_policy={policy!r}" if policy == "auto" else "auto_wrap_policy=policy"
        keywords += f", sharding_strategy={best.strategy!r}"
        if dtype is not None:
            keywords += f", mixed_precision=MixedPrecision({dtype}, torch.float32)"
        lines = ["import torch", "from flatshard import MixedPrecision, ShardedWrapper", ""]
        if (kind := self.target.checkpoint) != "none":
            lines.insert(2, "from flatshard.extras.plan import checkpoint_blocks")
            lines.append(f"checkpoint_blocks(model, {kind!r})")
        return "\n".join([*lines, f"model = ShardedWrapper(model, {keywords})"])

    def __str__(self) -> str:
        shown = self.best or smallest(self.choices)
        rows = [one.cells() for one in self.choices]
        peak = f"Its peak of {show(shown.outcome.peak_bytes)} is in {shown.outcome.peak_at}."
        lines = [
            f"{self.name}. Parameters, gradients, optimizer: bytes between steps. Unsharded, "
            "activations, temporary: bytes at the peak.",
            tabulate([[*rows[0]], *([*row.values()] for row in rows)], numbers=range(2, 12)),
        ]
        if shown.fits:
            return "\n".join([*lines, f"Cheapest that fits: {shown}. {peak}", "", self.code()])
        device = show(self.target.machine.device.memory_bytes)
        lines.append(
            f"Nothing fits into {device}. {shown} needs the least memory. {peak} Changes to try:"
        )
        for change, one in self.changes.items():
            fits = "fits" if one.fits else "does not fit"
            lines.append(f"- {change}: {show(one.outcome.peak_bytes)} with {one}, {fits}")
        return "\n".join(lines)


def counts(ranks: int | str | Sequence[int]) -> tuple[int, ...]:
    """Return numbers of ranks. ``8,64`` lists numbers, and ``8..64`` means 8, 16, 32, 64."""
    if not isinstance(ranks, str):
        return (ranks,) if isinstance(ranks, int) else tuple(ranks)
    try:
        first, dots, last = ranks.partition("..")
        if not dots:
            return tuple(map(int, ranks.split(",")))
        return tuple(int(first) << i for i in range((int(last) // int(first)).bit_length()))
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"ranks: expected numbers such as 8,64 or 8..64, got {ranks!r}") from None


def plan(spec: Build | str, *, step: Step | None = None, **options: Any) -> TrainingPlan:
    """Predict memory, communication and time of training a model, for each sharding strategy.

    One forward and backward of the model runs on fake tensors, which have no memory. The prediction
    needs no process group and no GPU, and does not communicate. The command ``flatshard plan``
    takes the same options, except ``auto_wrap_policy``.

    Example:
        ```python
        import flatshard

        def step(model):
            return loss_fn(model(inputs), labels)

        print(flatshard.plan(Model, step=step, ranks=[8, 64], memory="80GB"))
        ```

    Args:
        spec: a function that returns the model, or a tuple of the model and its ``step``.
            ``plan`` calls the function under ``torch.device("meta")``, so the model's tensors have
            no memory. Or a text: the path of a Hugging Face ``config.json``, or
            ``"package.module:function"``.
        step: a function that gets the model, runs a forward and returns the loss. None: the model
            is a language model, which takes token ids of shape ``(batch, seq)``.
        options: all optional:

            - ``ranks``: numbers of ranks to compare, such as ``"8,64"``, or ``"8..64"`` for 8, 16,
              32, 64. Default 8.
            - ``per_node``: number of ranks in one node. Default 8.
            - ``device``: name of a device, or a ``Device`` with the speeds. Default ``"h100"``.
            - ``memory``: bytes of memory per device, or a text such as ``"80GB"`` (powers of 1000)
              or ``"80GiB"``. Default: the memory of ``device``.
            - ``flops``: sustained floating point operations per second of matrix products, such as
              ``"600T"``. Default: the speed of ``device``.
            - ``link``: bytes per second that a node sends to other nodes, divided by the node's
              ranks. Default ``"50GB/s"``.
            - ``node_link``: bytes per second that one rank sends within a node. Default
              ``"450GB/s"``.
            - ``batch``: sequences per rank in one forward, if ``step`` is None. Default 1.
            - ``seq``: tokens per sequence, if ``step`` is None. Default 2048.
            - ``dtype``: ``"bf16"`` (default), ``"fp16"``, ``"fp32"`` or a ``MixedPrecision``.
            - ``optimizer``: ``"adamw"`` (default), ``"sgd"``, ``"momentum"``, ``"adam"``,
              ``"muon"``, ``"lion"``, or the bytes of state per trained element.
            - ``checkpoint``: the kind of activation checkpointing: ``"none"`` (default),
              ``"block"`` or ``"selective"``.
            - ``accumulate``: number of backwards per step, for gradient accumulation. Only the last
              backward reduces gradients; the others run under ``no_sync``. Default 1.
            - ``strategy``: names of the sharding strategies to compare. Default: all.
            - ``auto_wrap_policy``: the policy that selects the units. Default ``"auto"``.

    Raises:
        CannotTraceError: the model's forward needs real values, which fake tensors lack.
        ValueError: the name of the model or device is unknown, or a number is too small.
        TypeError: ``step`` is None, and the model does not return logits; or ``step`` does not
            return a loss.
    """
    build = read_spec(spec) if isinstance(spec, str) else spec
    target = Target(build, step, **options)
    name = spec if isinstance(spec, str) else getattr(spec, "__name__", "model")
    made = TrainingPlan(name, target, target.choices())
    return replace(made, changes=target.changes()) if made.best is None else made


# ------------------------------------------------------------ the model to plan for


def language_step(batch: int, seq: int) -> Step:
    """Return a ``step`` for language models, which computes the loss of ``(batch, seq)`` tokens."""

    def step(model: nn.Module) -> Tensor:
        tokens = torch.zeros(batch, seq, dtype=torch.long)
        logits = model(tokens)
        logits = getattr(logits, "logits", logits)
        if not (isinstance(logits, Tensor) and logits.dim() == 3):
            raise TypeError(
                "plan: expected logits of shape (batch, length, vocabulary) from the model, got "
                f"{getattr(logits, 'shape', type(logits).__name__)}. Give `plan` a `step` that "
                "runs your forward and returns the loss."
            )
        flat = logits.flatten(0, 1).float()
        del logits  # free the logits in the compute dtype: usual training loops free them here
        return F.cross_entropy(flat, tokens.flatten())

    return step


def read_spec(spec: str) -> Build:
    """Return the function that builds the model named by ``spec``.

    ``spec`` is the path of a Hugging Face ``config.json`` or its folder, or
    ``package.module:function``. The returned function returns a model, or a tuple of a model and a
    ``Step``.
    """
    path = Path(spec, "config.json") if Path(spec).is_dir() else Path(spec)
    if path.suffix == ".json":
        return partial(_from_config, path)
    try:
        found = pkgutil.resolve_name(spec)
        if not callable(found):
            raise TypeError(f"{spec} is a {type(found).__name__}")
        return found  # type: ignore[no-any-return]
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ValueError(
            f"{spec!r} is neither a config.json nor a function such as package.module:build. "
            f"Importing the function raised: {error}"
        ) from error


def _from_config(path: Path) -> nn.Module:
    try:
        transformers = importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise ValueError(f"{path} needs transformers. Run: pip install transformers") from error
    try:
        # Turn off the cache of keys and values: when backward recomputes a forward, the cache would
        # grow.
        options = json.loads(path.read_text()) | {"use_cache": False}
        config = transformers.AutoConfig.for_model(**options)
        return transformers.AutoModelForCausalLM.from_config(config)
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise ValueError(
            f"{path}: transformers {transformers.__version__} cannot make a language model of this "
            f"configuration. Pass package.module:function. {f'{error}'.partition(chr(10))[0]}"
        ) from error


# ------------------------------------------------------------ the command ``flatshard plan``


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add: Any = parser.add_argument
    add("spec", help="a config.json, or package.module:function")
    # The docstring of `plan` explains each option in an item of a list: "- ``name``: text".
    items = re.findall(r"- ``(\w+)``: (.*?)(?=\n +- ``|\n\n)", plan.__doc__ or "", re.DOTALL)
    texts = {name: " ".join(text.replace("`", "").split()) for name, text in items}
    for one in fields(Target):
        name, kind = one.name, int if one.type is int else str
        if name in ("build", "step", "auto_wrap_policy"):
            continue  # no value of this field can be written on a command line
        more: Any = {"choices": _CHOICES[name]} if name in _CHOICES else {"type": kind}
        more |= {"nargs": "+"} if name == "strategy" else {}
        add(f"--{name.replace('_', '-')}", default=one.default, help=texts.get(name), **more)
    add("--json", action="store_true", help="print the predictions as JSON, in bytes and seconds")


def run(options: dict[str, Any]) -> None:
    """Print the plan for ``options``. Raises ValueError if the options cannot be used."""
    as_json = options.pop("json")
    made = plan(**options)
    print(json.dumps([asdict(one) for one in made.choices], indent=1) if as_json else made)
