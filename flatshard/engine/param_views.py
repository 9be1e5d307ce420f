"""``ParamViews``: the parameters of one flat parameter, as users and modules hold them.

[Note: who is who]
    sharded   what users and optimizers hold: true-shape ``FlatShardTensor`` parameters, or one
              ``FlatParameter`` (``use_orig_params=False``), over this rank's shard
    full      plain parameters over the unsharded buffer; modules hold them while they compute
Where one rank holds everything and nothing is cast, the shard *is* the unsharded buffer and, with
``use_orig_params=True``, the sharded parameters are the full ones.

It shows memory that ``FlatParamHandle`` owns.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flatshard.engine.gather import HandleOptions
from flatshard.engine.run_link import RunLink
from flatshard.plan.layout import FlatLayout
from flatshard.plan.module_tree import unit_text
from flatshard.plan.param_info import ParamInfo
from flatshard.tensor import freed_parameter
from flatshard.tensor.flat_parameter import FlatParameter, FlatParameterPart, view_of
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
        self.use_orig_params = options.use_orig_params
        # Whether what users see are the original objects, over the shard.
        self.are_originals = self.use_orig_params and self.is_whole
        self.owned = [SwappableParam(info) for info in owned]
        self.sharded = [info.param for info in (owned if self.use_orig_params else owned[:1])]
        self.full: list[nn.Parameter] = []  # in the order of `layout.spans`
        self._may_read = True
        self._placeholders: list[Any] = []  # ``FlatShardTensor``s
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
        spec_of = partial(
            ShardSpec,
            comm=topology.shard,
            replicas=topology.replicate,
            # Optimizers keep what has the parameters' shape there; None: in memory.
            state_disk=self.options.targets.state,
        )
        self.specs = [
            spec_of(
                span.name,
                unit,
                span.shape,
                offset=local.offset,
                numel=local.numel,
                start=local.start,
                order=span.order,
            )
            for span, local in zip(layout.spans, self.local_spans, strict=True)
        ]
        # Of the flat parameter.
        self.flat_spec = spec_of(
            f"{unit or 'the root'}'s flat parameter",
            unit,
            (layout.shard_numel,),
            offset=0,
            numel=layout.shard_numel,
            originals=self.local_spans,
            number=topology.index,
            total_numel=layout.numel,
        )

    def show_shard(self, shard: Tensor) -> Tensor:
        """Let what users see show a shard, ``(layout.shard_numel,)``; returns the same memory."""
        requires_grad = self.requires_grad()
        if not self.use_orig_params:
            shard = self._show_flat(shard, requires_grad[0])
        else:
            for index, (owned, span) in enumerate(zip(self.owned, self.layout.spans, strict=True)):
                asks = requires_grad[index]
                if not self.is_whole:
                    sharded = FlatShardTensor.parameter(shard, self.specs[index], asks)
                    average_full_gradients(sharded)
                    owned.swap_into(sharded)
                elif owned.param.is_meta:
                    owned.swap_into(nn.Parameter(view_of(shard, span), asks))
                else:
                    # Hooks and attributes stay where they are: only the memory moves.
                    owned.param.data = view_of(shard, span)
        disk = self.flat_spec.state_disk
        if disk is not None:
            for param in self.sharded:
                if not isinstance(param, FlatShardTensor):  # those have it in their spec
                    STATE_DISKS[param] = disk
        return shard

    def _show_flat(self, shard: Tensor, requires_grad: bool) -> Tensor:
        flat = self.sharded[0]
        if isinstance(flat, FlatParameter):
            flat.point_at(shard)
        else:
            flat = FlatParameter(shard, requires_grad, self.layout, self.options.topology.index)
            for owned in self.owned:
                # Kept any longer, the originals would be a full copy of the unit on every rank.
                owned.flatten_into(flat, self.link.unit_name)
            self.sharded = [flat]
        # A view of the parameter, so that both share one version counter.
        shard = flat.detach()
        self._placeholders = [
            FlatParameterPart(shard[local.start : local.end], spec, requires_grad)
            for spec, local in zip(self.specs, self.local_spans, strict=True)
        ]
        return shard

    def make_full(self, buffer: Tensor, *, is_shard: bool) -> None:
        """Make the full parameters over an unsharded buffer, ``(layout.padded_numel,)``."""
        requires_grad, before = self.requires_grad(), self.full
        with torch.inference_mode(False), torch.no_grad():
            if is_shard and self.use_orig_params:
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
                if self.use_orig_params and not self.is_whole:
                    self.owned[index].move_hooks(full)

    def _hook_grad(self, index: int) -> None:
        watched = [self.full[index]]
        if self.are_originals and not self.are_full:
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
        self.flat_spec.unit = self.link.unit_name
        for spec in self.specs:
            spec.name, spec.unit = strip(spec.name), self.link.unit_name

    @property
    def are_full(self) -> bool:
        """Whether the sharded parameters are plain and compute themselves."""
        return self.full is self.sharded

    def requires_grad(self) -> list[bool]:
        """Whether it is trained, per original parameter."""
        with torch._C.DisableTorchFunctionSubclass():
            found = [param.requires_grad for param in self.sharded]
        return found if self.use_orig_params else found * len(self.specs)

    # ------------------------------------------------------------ what modules hold

    def use_unsharded_views(self) -> None:
        """Give the modules the full parameters. Raises as ``check_places``."""
        if self.are_full:
            return
        with torch._C.DisableTorchFunctionSubclass():
            if self.use_orig_params:
                for full, sharded in zip(self.full, self.sharded, strict=True):
                    # Users freeze the sharded parameter; asked first, as setting it costs more.
                    if full.requires_grad is not sharded.requires_grad:
                        full.requires_grad_(sharded.requires_grad)
            else:
                for shown in (*self.full, *self._placeholders):
                    shown.requires_grad_(self.sharded[0].requires_grad)
        self.check_places()
        self.put(self.full)

    def check_places(self) -> None:
        """Raise RuntimeError if a module's parameter was replaced since wrapping."""
        for module, attribute, index in self.places:
            present = module._parameters.get(attribute)
            held = (self.held or self.full)[index]
            if present is not held and present is not self._outside(index):
                raise RuntimeError(
                    f"parameter {self.specs[index].name!r} ({unit_text(self.link.unit_name)}) was "
                    "replaced after wrapping. Assign values with p.copy_(...), or replace the "
                    "parameter before wrapping."
                )

    def put(self, params: list[nn.Parameter]) -> None:
        for module, attribute, index in self.places:
            module._parameters[attribute] = params[index]
            if self._placeholders:
                module.__dict__.pop(attribute, None)
        self.held = params
        self._rebuild_rnns()

    def use_sharded_views(self) -> None:
        if not self.are_full:
            self.show_sharded()

    def show_sharded(self) -> None:
        """Let the modules hold the sharded parameters, whatever they hold now."""
        for module, attribute, index in self.places:
            module._parameters[attribute] = self._outside(index)
            if self._placeholders:
                # Found before ``_parameters``: reading the weight gives a tensor that explains.
                module.__dict__[attribute] = self._placeholders[index]
        self.held = []
        self._rebuild_rnns()

    def _outside(self, index: int) -> nn.Parameter | None:
        return self.sharded[index] if self.use_orig_params else None

    def _rebuild_rnns(self) -> None:
        for module in self._rnns:
            names = module._flat_weights_names
            module.__dict__["_flat_weights"] = [getattr(module, name, None) for name in names]
            # Recurrent modules compare these weak references with their weights; None means equal.
            module._flat_weight_refs = [None] * len(names)

    def list_placeholders(self, *, shown: bool) -> None:
        """With ``use_orig_params=False``, list the originals among the modules' parameters."""
        if self._placeholders and not self.held:
            for module, attribute, index in self.places:
                module._parameters[attribute] = self._placeholders[index] if shown else None
