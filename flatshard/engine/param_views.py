"""``ParamViews``: the parameters of one flat parameter, as users and modules hold them.

[Note: who is who]
    sharded   true-shape ``FlatShardTensor`` parameters over this rank's shard; users and
              optimizers hold them. Where one rank holds everything, they are plain parameters.
    full      plain parameters over the unsharded buffer; modules hold them while they compute
Where one rank holds everything and nothing is cast, the shard *is* the unsharded buffer, and the
sharded parameters are the full ones.

It shows memory that ``FlatParamHandle`` owns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from flatshard.engine.gather import HandleOptions
from flatshard.engine.run_link import RunLink
from flatshard.plan.layout import FlatLayout, view_of
from flatshard.plan.module_tree import unit_text
from flatshard.plan.param_info import ParamInfo
from flatshard.tensor import freed_parameter
from flatshard.tensor.gathered import average_full_gradients
from flatshard.tensor.param_swap import SwappableParam
from flatshard.tensor.shard_spec import ShardSpec
from flatshard.tensor.sharded_tensor import FlatShardTensor
from flatshard.tensor.tensor_notes import STATE_DISKS

GradHook = Callable[[int], Callable[[Tensor], None]]


class ParamViews:
    """The sharded and the full parameters, and the places in modules where they stand."""

    def __init__(
        self, owned: list[ParamInfo], link: RunLink, options: HandleOptions, layout: FlatLayout
    ) -> None:
        self.link, self.layout, self.options = link, layout, options
        self.is_whole = options.topology.shard.size == 1
        self.owned = [SwappableParam(info) for info in owned]
        self.sharded = [info.param for info in owned]
        self.full: list[nn.Parameter] = []  # in the order of `layout.spans`
        self._may_read = True
        self.held: list[nn.Parameter] = []  # what `put` was given, while modules hold it
        # Which range of this rank's shard is of which original parameter.
        rank = options.topology.index
        self.local_spans = [layout.local_span(index, rank) for index in range(len(owned))]
        # Every place of every original parameter: the module, the attribute and the index.
        self.places = [
            (site.module, site.attribute, index)
            for index, one in enumerate(owned)
            for site in one.locations
        ]
        self._rnns = {one for one, _, _ in self.places if isinstance(one, nn.RNNBase)}
        self._grad_hook: GradHook | None = None
        self._make_specs()

    def _make_specs(self) -> None:
        topology, layout, unit = self.options.topology, self.layout, self.link.unit_name
        self.specs = [
            ShardSpec(
                span.name,
                unit,
                span.shape,
                offset=local.offset,
                numel=local.numel,
                start=local.start,
                order=span.order,
                comm=topology.shard,
                replicas=topology.replicate,
                # Optimizers keep what has the parameters' shape there; None: in memory.
                state_disk=self.options.targets.state,
            )
            for span, local in zip(layout.spans, self.local_spans, strict=True)
        ]

    def show_shard(self, shard: Tensor) -> None:
        """Let the sharded parameters show a shard, ``(layout.shard_numel,)``."""
        requires_grad, disk = self.requires_grad(), self.options.targets.state
        for index, (owned, span) in enumerate(zip(self.owned, self.layout.spans, strict=True)):
            asks = requires_grad[index]
            if not self.is_whole:
                sharded = FlatShardTensor.parameter(shard, self.specs[index], asks)
                average_full_gradients(sharded)
                owned.swap_into(sharded)
                continue
            if owned.param.is_meta:
                owned.swap_into(nn.Parameter(view_of(shard, span), asks))
            else:
                # Hooks and attributes stay where they are: only the memory moves.
                owned.param.data = view_of(shard, span)
            if disk is not None:  # the spec of a ``FlatShardTensor`` names the disk
                STATE_DISKS[owned.param] = disk

    def make_full(self, buffer: Tensor, *, is_shard: bool) -> None:
        """Make the full parameters over an unsharded buffer, ``(layout.padded_numel,)``."""
        requires_grad, before = self.requires_grad(), self.full
        with torch.inference_mode(False), torch.no_grad():
            if is_shard:
                self.full = self.sharded
            else:
                self._may_read = True
                self.full = [nn.Parameter(view_of(buffer, s), False) for s in self.layout.spans]
                for spec, full in zip(self.specs, self.full, strict=True):
                    freed_parameter.name(full, spec)
            for index, full in enumerate(self.full):
                self.specs[index].full = full
                full.requires_grad_(requires_grad[index])  # False for integers
                # Originals that compute themselves are the same objects after a conversion.
                if before and before[index] is not full:
                    # The dictionary, so that handles can still remove what is in it.
                    full._backward_hooks = before[index]._backward_hooks
                    self._hook_grad(index)
                if not self.is_whole:
                    self.owned[index].move_hooks(full)

    def _hook_grad(self, index: int) -> None:
        watched = [self.full[index]]
        if self.is_whole and not self.are_full:
            # Plain ones may be used outside of forward, and those gradients are averaged, too.
            watched.append(self.sharded[index])
        for param in watched:
            if self._grad_hook is not None and (param.is_floating_point() or param.is_complex()):
                is_trained = param.requires_grad
                # A frozen tensor refuses hooks; it may be unfrozen later.
                param.requires_grad_(True)
                param.register_post_accumulate_grad_hook(self._grad_hook(index))
                param.requires_grad_(is_trained)

    def connect(self, grad_hook: GradHook) -> None:
        """Let ``grad_hook`` make what a full parameter, given by its index, calls with a gradient.

        Autograd holds what it makes, which must not keep the unit alive.
        """
        self._grad_hook = grad_hook
        with torch.inference_mode(False):
            for index in range(len(self.full)):
                self._hook_grad(index)

    def set_accessible(self, may_read: bool) -> None:
        """Say whether the full parameters have memory, unless they compute themselves."""
        if self._may_read is not may_read and not self.are_full:
            self._may_read = may_read
            freed_parameter.set_accessible(self.full, may_read)

    def copied(self, memo: dict[int, Any], link: RunLink) -> ParamViews:
        """The same for modules that were deep-copied; shows nothing before ``show_shard``."""
        owned = [one.copied(memo) for one in self.owned]
        twin = type(self)(owned, link, self.options, self.layout)
        for copied, spec in zip(twin.specs, self.specs, strict=True):
            copied.name = spec.name  # that of the layout is relative to the first root
        return twin

    def rename(self, strip: Callable[[str], str]) -> None:
        """Take names relative to another root; ``strip`` maps the old to the new ones."""
        for spec in self.specs:
            spec.name, spec.unit = strip(spec.name), self.link.unit_name

    @property
    def are_full(self) -> bool:
        """Whether the sharded parameters are plain and compute themselves."""
        return self.full is self.sharded

    def requires_grad(self) -> list[bool]:
        """Whether it is trained, per original parameter."""
        with torch._C.DisableTorchFunctionSubclass():
            return [param.requires_grad for param in self.sharded]

    # ------------------------------------------------------------ what modules hold

    def use_unsharded_views(self) -> None:
        """Give the modules the full parameters. Raises as ``check_places``."""
        if self.are_full:
            return
        with torch._C.DisableTorchFunctionSubclass():
            for full, sharded in zip(self.full, self.sharded, strict=True):
                # Users freeze the sharded parameter; asked first, as setting it costs more.
                if full.requires_grad is not sharded.requires_grad:
                    full.requires_grad_(sharded.requires_grad)
        self.check_places()
        self.put(self.full)

    def check_places(self) -> None:
        """Raise RuntimeError if a module's parameter was replaced since wrapping."""
        for module, attribute, index in self.places:
            present = module._parameters.get(attribute)
            held = (self.held or self.full)[index]
            if present is not held and present is not self.sharded[index]:
                raise RuntimeError(
                    f"parameter {self.specs[index].name!r} ({unit_text(self.link.unit_name)}) was "
                    "replaced after wrapping. Assign values with p.copy_(...), or replace the "
                    "parameter before wrapping."
                )

    def put(self, params: list[nn.Parameter]) -> None:
        for module, attribute, index in self.places:
            module._parameters[attribute] = params[index]
        self.held = params
        self._rebuild_rnns()

    def use_sharded_views(self) -> None:
        if not self.are_full:
            self.show_sharded()

    def show_sharded(self) -> None:
        """Let the modules hold the sharded parameters, whatever they hold now."""
        for module, attribute, index in self.places:
            module._parameters[attribute] = self.sharded[index]
        self.held = []
        self._rebuild_rnns()

    def _rebuild_rnns(self) -> None:
        for module in self._rnns:
            names = module._flat_weights_names
            module.__dict__["_flat_weights"] = [getattr(module, name, None) for name in names]
            # Recurrent modules compare these weak references with their weights; None means equal.
            module._flat_weight_refs = [None] * len(names)
