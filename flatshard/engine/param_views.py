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

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from flatshard.comm.topology import Topology
from flatshard.engine.offload import OffloadTargets
from flatshard.plan.layout import FlatLayout, LocalSpan
from flatshard.plan.param_info import ParamInfo, ParamLocation
from flatshard.tensor import freed_parameter
from flatshard.tensor.flat_parameter import FlatParameter, FlatParameterPart, view_of
from flatshard.tensor.param_swap import SwappableParam
from flatshard.tensor.shard_spec import ShardSpec
from flatshard.tensor.sharded_tensor import FlatShardTensor, attributes_of

T = TypeVar("T")


class ParamViews:
    """The sharded and the full parameters, and the places in modules where they stand.

    Attributes:
        unit_name: names the unit in errors.
        layout: where each original parameter lies.
        local_spans: which range of this rank's shard is of which original parameter.
        specs: what this rank holds of each original parameter.
        flat_spec: what it holds of the flat parameter.
        places: every place of every original parameter: the module, the attribute and the index.
        sharded: the parameters that users see.
        full: the parameters that compute, in the order of ``layout.spans``.
        is_whole: whether this rank's shard is all of it.
        use_orig_params: whether users see original parameters or one ``FlatParameter``.
        are_originals: whether what users see are the original objects, over the shard.
    """

    def __init__(
        self,
        owned: list[ParamInfo],
        unit_name: str,
        *,
        layout: FlatLayout,
        topology: Topology,
        use_orig_params: bool,
        on_outside_grad: Callable[[], object],
    ) -> None:
        """Describe what this rank holds; ``make_sharded`` and ``make_full`` fill it.

        Args:
            owned: parameters of one dtype and ``requires_grad``, with their places.
            unit_name: the unit's name in the unwrapped model.
            layout: where each of them lies.
            topology: the ranks that share them.
            use_orig_params: whether users see original parameters or one ``FlatParameter``.
            on_outside_grad: called before autograd adds to a sharded parameter's ``.grad`` what
                came of its use outside of forward; is not kept alive.
        """
        self.unit_name = unit_name
        self.layout = layout
        self.is_whole = topology.shard.size == 1
        self.use_orig_params = use_orig_params
        self.are_originals = use_orig_params and self.is_whole
        self._owned = [SwappableParam(info) for info in owned]
        self._topology = topology
        self.sharded: list[nn.Parameter] = []
        self.full: list[nn.Parameter] = []
        self._may_read = True
        self._placeholders: list[FlatShardTensor] = []
        self._hooked: set[int] = set()
        self._is_installed = False
        self.local_spans: list[LocalSpan] = [
            layout.local_span(index, topology.index) for index in range(len(owned))
        ]
        self.places = [
            (site.module, site.attribute, index)
            for index, one in enumerate(owned)
            for site in one.locations
        ]
        # By wrapped module: of the places, those inside.
        self._places_of: dict[nn.Module, list[tuple[nn.Module, str, int]]] = {}
        self._rnns = [module for module in self.modules() if isinstance(module, nn.RNNBase)]
        self._make_specs(_weakly(on_outside_grad, gone=None))

    # ------------------------------------------------------------ construction

    def _make_specs(self, on_outside_grad: Callable[[], object]) -> None:
        topology = self._topology
        self.specs = [
            ShardSpec(
                span.name,
                self.unit_name,
                span.shape,
                offset=local.offset,
                numel=local.numel,
                start=local.start,
                comm=topology.shard,
                replicas=topology.replicate,
                order=span.order,
                on_outside_grad=on_outside_grad,
            )
            for span, local in zip(self.layout.spans, self.local_spans, strict=True)
        ]
        self.flat_spec = ShardSpec(
            f"{self.unit_name or 'the root'}'s flat parameter",
            self.unit_name,
            (self.layout.shard_numel,),
            offset=0,
            numel=self.layout.shard_numel,
            comm=topology.shard,
            replicas=topology.replicate,
            originals=self.local_spans,
            number=topology.index,
            total_numel=self.layout.numel,
        )

    def make_sharded(self, shard: Tensor) -> None:
        """Turn the originals, which keep their identity, into what users see.

        Args:
            shard: this rank's part, ``(layout.shard_numel,)``, with the values.
        """
        requires_grad = [owned.param.requires_grad for owned in self._owned]
        if not self.use_orig_params:
            self._placeholders = self._make_placeholders(shard, requires_grad[0])
            flat = FlatParameter(shard, requires_grad[0], self.layout, self._topology.index)
            for owned in self._owned:
                # Kept any longer, the originals would be a full copy of the unit on every rank.
                owned.flatten_into(flat, self.unit_name)
            self.sharded = [flat]
            return
        if self.is_whole:
            for index, (owned, span) in enumerate(zip(self._owned, self.layout.spans, strict=True)):
                view = view_of(shard, span)
                if owned.param.is_meta:
                    owned.swap_into(nn.Parameter(view, requires_grad[index]))
                else:
                    # Hooks and attributes stay where they are: only the memory moves.
                    owned.param.data = view
        else:
            views = self._shard_views(shard, requires_grad)
            for owned, shown in zip(self._owned, views, strict=True):
                owned.swap_into(shown)
        self.sharded = [owned.param for owned in self._owned]

    def _shard_views(self, shard: Tensor, requires_grad: list[bool]) -> list[FlatShardTensor]:
        """One true-shape tensor per original parameter, over this rank's range of it."""
        return [
            FlatShardTensor.parameter(shard, spec, is_trained)
            for spec, is_trained in zip(self.specs, requires_grad, strict=True)
        ]

    def _make_placeholders(self, shard: Tensor, requires_grad: bool) -> list[FlatShardTensor]:
        """The same where users hold one flat parameter."""
        return [
            FlatParameterPart(shard[local.start : local.end], spec, requires_grad)
            for spec, local in zip(self.specs, self.local_spans, strict=True)
        ]

    def make_full(
        self,
        buffer: Tensor,
        *,
        is_shard: bool,
        grad_hook: Callable[[int], Callable[[Tensor], None]],
    ) -> None:
        """Make the full parameters; once per buffer.

        Args:
            buffer: the unsharded buffer, ``(layout.padded_numel,)``.
            is_shard: whether that is the shard as well.
            grad_hook: makes what is called with a full parameter, given by its index, once
                autograd has put its gradient into ``.grad``.
        """
        requires_grad = self.requires_grad()
        before = self.full
        with torch.inference_mode(False), torch.no_grad():
            if is_shard and self.use_orig_params:
                self.full = self.sharded
            else:
                self.full = [
                    nn.Parameter(view_of(buffer, span), requires_grad=False)
                    for span in self.layout.spans
                ]
                self._may_read = True
                for spec, full in zip(self.specs, self.full, strict=True):
                    freed_parameter.name(full, spec)
            for index, (spec, full) in enumerate(zip(self.specs, self.full, strict=True)):
                spec.full = full
                differentiable = full.is_floating_point() or full.is_complex()
                if differentiable and id(full) not in self._hooked:
                    # A frozen tensor refuses hooks; it may be unfrozen later.
                    full.requires_grad_(True)
                    full.register_post_accumulate_grad_hook(grad_hook(index))
                    if before:
                        # The dictionary, so that handles can still remove what is in it.
                        full._backward_hooks = before[index]._backward_hooks
                full.requires_grad_(requires_grad[index])  # False for integers
                if self.use_orig_params and not self.is_whole:
                    self._owned[index].move_hooks(full)
        # Originals that compute themselves stay the same objects through a conversion.
        self._hooked = {id(full) for full in self.full}

    def set_accessible(self, may_read: bool) -> None:
        """Say whether the full parameters have memory, unless they compute themselves."""
        if self._may_read is not may_read and not self.are_full:
            self._may_read = may_read
            freed_parameter.set_accessible(self.full, may_read)

    def repoint(self, shard: Tensor) -> Tensor:
        """Let the sharded parameters show another shard, keeping their identity.

        Args:
            shard: ``(layout.shard_numel,)``, of any dtype and device.

        Returns:
            ``shard``, or the same memory with the version counter of what users hold.
        """
        if not self.use_orig_params:
            flat = self.sharded[0]
            assert isinstance(flat, FlatParameter)
            flat.point_at(shard)
            # A view of the parameter, so that both share one version counter.
            shard = flat.detach()
            self._placeholders = self._make_placeholders(shard, flat.requires_grad)
        elif self.is_whole:
            for param, span in zip(self.sharded, self.layout.spans, strict=True):
                param.data = view_of(shard, span)
        else:
            views = self._shard_views(shard, self.requires_grad())
            for owned, view in zip(self._owned, views, strict=True):
                owned.swap_into(view)
        return shard

    def bring_back_by(self, bring_back: Callable[[], bool]) -> None:
        """Say what unshards the full parameters where they are used after they were resharded.

        Args:
            bring_back: whether they are there then; is not kept alive.
        """
        for spec in self.specs:
            spec.bring_back = _weakly(bring_back, gone=False)

    def keep_state_at(self, targets: OffloadTargets) -> None:
        """Let optimizers keep what has the parameters' shape in its target."""
        for spec in (*self.specs, self.flat_spec):
            spec.state_disk = targets.state
        for param in self.sharded:
            if not isinstance(param, FlatShardTensor):
                param.state_disk = targets.state  # type: ignore[attr-defined]  # read by optimizer/offload

    def copy_for(self, memo: dict[int, Any], on_outside_grad: Callable[[], object]) -> ParamViews:
        """The same for modules that were deep-copied; shows nothing before ``repoint``.

        Args:
            memo: the finished copy's memo, which knows every module's and parameter's copy.
            on_outside_grad: as at construction, for the copy.
        """
        twin = ParamViews(
            [owned.copied(memo) for owned in self._owned],
            self.unit_name,
            layout=self.layout,
            topology=self._topology,
            use_orig_params=self.use_orig_params,
            on_outside_grad=on_outside_grad,
        )
        twin.sharded = [memo[id(param)] for param in self.sharded]
        for copied, spec in zip(twin.specs, self.specs, strict=True):
            copied.name = spec.name  # that of the layout is relative to the first root
        return twin

    def rename(self, unit_name: str, strip: Callable[[str], str]) -> None:
        """Take names relative to another root; ``strip`` maps the old to the new ones."""
        self.unit_name = self.flat_spec.unit = unit_name
        for spec in self.specs:
            spec.name, spec.unit = strip(spec.name), unit_name

    # ------------------------------------------------------------ what they are

    @property
    def are_full(self) -> bool:
        """Whether the sharded parameters are plain and compute themselves."""
        return self.full is self.sharded

    def requires_grad(self) -> list[bool]:
        """Whether it is trained, per original parameter."""
        with torch._C.DisableTorchFunctionSubclass():
            found = [param.requires_grad for param in self.sharded]
        return found if self.use_orig_params else found * len(self.specs)

    def traits(self, index: int) -> tuple[bool, dict[str, Any]]:
        """Whether original parameter ``index`` is trained, and the attributes users gave it."""
        if not self.use_orig_params:
            return self.sharded[0].requires_grad, {}
        with torch._C.DisableTorchFunctionSubclass():
            return self.sharded[index].requires_grad, attributes_of(self.sharded[index])

    def num_trainable(self) -> int:
        """Full parameters that ask for a gradient."""
        return sum(full.requires_grad for full in self.full)

    def modules(self) -> set[nn.Module]:
        """The modules in which the parameters stand."""
        return {module for module, _, _ in self.places}

    def locations(self, index: int) -> list[ParamLocation]:
        """Where original parameter ``index`` stands; the first place names it."""
        return self._owned[index].locations

    # ------------------------------------------------------------ what modules hold

    def use_unsharded_views(self) -> None:
        """Give the modules the full parameters.

        Raises:
            RuntimeError: a module's parameter was replaced by another object since wrapping.
        """
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
        """See that the modules hold what they were given.

        Raises:
            RuntimeError: a module's parameter was replaced by another object since wrapping.
        """
        for module, attribute, index in self.places:
            present = module._parameters.get(attribute)
            if present is not self.full[index] and present is not self._outside(index):
                raise RuntimeError(
                    f"parameter {self.specs[index].name!r} (unit {self.unit_name!r}) was "
                    "replaced after wrapping. Assign values with p.copy_(...), or replace the "
                    "parameter before wrapping."
                )

    def check_installed(self, outer: nn.Module) -> None:
        """See that the modules in ``outer`` still hold the full parameters.

        Raises:
            RuntimeError: a forward replaced one of them.
        """
        for module, attribute, index in self._places_in(outer):
            if module._parameters.get(attribute) is not self.full[index]:
                raise RuntimeError(
                    f"parameter {self.specs[index].name!r} (unit {self.unit_name!r}) was replaced "
                    "in forward: the model would go on with the one before. Compute with the "
                    "changed value instead, without assigning it to the module."
                )

    def _places_in(self, outer: nn.Module) -> list[tuple[nn.Module, str, int]]:
        found = self._places_of.get(outer)
        if found is None:
            inside = set(outer.modules())
            found = [place for place in self.places if place[0] in inside]
            self._places_of[outer] = found
        return found

    def put(self, params: list[nn.Parameter]) -> None:
        """Let the modules hold ``params``, one per original parameter."""
        for module, attribute, index in self.places:
            module._parameters[attribute] = params[index]
            if self._placeholders:
                module.__dict__.pop(attribute, None)
        self._is_installed = True
        self._rebuild_rnns()

    def use_sharded_views(self) -> None:
        """Give the modules the sharded parameters back."""
        if not self.are_full:
            self.show_sharded()

    def show_sharded(self) -> None:
        """Let the modules hold the sharded parameters, whatever they hold now."""
        for module, attribute, index in self.places:
            module._parameters[attribute] = self._outside(index)
            if self._placeholders:
                # Found before ``_parameters``: reading the weight gives a tensor that explains.
                module.__dict__[attribute] = self._placeholders[index]
        self._is_installed = False
        self._rebuild_rnns()

    def _outside(self, index: int) -> nn.Parameter | None:
        return self.sharded[index] if self.use_orig_params else None

    def _rebuild_rnns(self) -> None:
        for module in self._rnns:
            names = module._flat_weights_names
            module.__dict__["_flat_weights"] = [getattr(module, name, None) for name in names]
            # Recurrent modules compare these weak references with their weights; None means equal.
            module._flat_weight_refs = [None] * len(names)

    def hide(self) -> list[tuple[dict[str, Any], str, Any]]:
        """Take the parameters out of the modules; returns what to put back where."""
        hidden = []
        for module, attribute, _ in self.places:
            hidden.append((module._parameters, attribute, module._parameters[attribute]))
            module._parameters[attribute] = None
        return hidden

    def show_placeholders(self) -> None:
        """With ``use_orig_params=False``, list the originals among the modules' parameters."""
        if self._placeholders and not self._is_installed:
            for module, attribute, index in self.places:
                module._parameters[attribute] = self._placeholders[index]  # type: ignore[assignment]

    def hide_placeholders(self) -> None:
        """Undo ``show_placeholders``."""
        if self._placeholders and not self._is_installed:
            for module, attribute, _ in self.places:
                module._parameters[attribute] = None


def _weakly(method: Callable[[], T], gone: T) -> Callable[[], T]:
    """A bound method that does not keep its object: ``.grad`` is unseen by the collector too."""
    this = weakref.WeakMethod(method)

    def call() -> T:
        found = this()
        return gone if found is None else found()

    return call
