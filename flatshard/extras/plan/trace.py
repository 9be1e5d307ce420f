"""``trace``: runs one forward and backward of a model on fake tensors, and records the operators.

A fake tensor (``FakeTensorMode``) has a shape, a dtype and a device, but no memory, so a model of
any size can be traced on any machine. The user's forward and torch's autograd run unchanged:
autograd decides which tensors are saved for backward, and activation checkpointing decides which
tensors are computed again.
"""

import contextlib
import logging
import sys
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as checkpointing
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.hooks import RemovableHandle

from flatshard.engine.forward import call_first
from flatshard.extras.plan.shards import FlatMemory
from flatshard.module.model_plan import ModelPlan, PlannedUnit
from flatshard.options.extras import extra
from flatshard.precision import UnitCasts, tensors_in
from flatshard.units.module_tree import ModuleTree, unit_text

_aten = torch.ops.aten

Build = Callable[[], Any]  # returns a model, or a tuple of a model and its step
Step = Callable[[nn.Module], Tensor]  # runs a forward, and returns the loss
Checkpointing = Literal["none", "block", "selective"]

# ---------------------------------------------------------------- what a trace contains


class Op(NamedTuple):
    """An operator that read or wrote memory. Operators that only return views are left out."""

    name: str  # such as ``aten.mm``
    flops: int  # 0 if only memory limits the operator's speed
    nbytes: int  # number of bytes that the operator reads and writes
    is_attention: bool


class Mark(NamedTuple):
    """A moment of the step.

    ``what`` is one of:

    - ``allocate`` and ``free``: the memory of ``block`` is allocated or freed.
    - ``enter`` and ``leave``: the forward of a module of ``unit`` begins or ends. After the mark
      ``backward``, the forward is a recomputation by activation checkpointing.
    - ``input``: a module of ``unit`` got an input that needs a gradient.
    - ``backward``: the backward begins.
    - ``enter backward``: the gradient of an output of ``unit`` is known.
    - ``leave backward``: the gradient of an input of ``unit`` is known.
    - ``gradient``: the gradient of a parameter is complete. ``block`` is the gradient's memory.
      ``unit`` is not a unit here, but the index of the flat parameter.
    """

    what: str
    unit: int = -1
    block: int = -1


class StepTrace:
    """One forward and backward of a model on one rank, as events in the order of execution.

    A block is the memory of one tensor and of all its views. Parameters and buffers have no block.
    """

    def __init__(self, plan: ModelPlan) -> None:
        """Make a trace without events."""
        self.events: list[Op | Mark] = []
        self.sizes: list[int] = []  # bytes of each block
        self.makers: list[str] = []  # operator that made each block
        self.names = [unit.name for unit in plan.units]
        # Count a buffer once, even if several modules share the buffer.
        self.buffer_bytes = sum(one.nbytes for one in {*plan.module.buffers()})

    def allocate(self, nbytes: int, maker: str) -> int:
        """Add a block, and return its index."""
        self.sizes.append(nbytes)
        self.makers.append(maker)
        self.events.append(Mark("allocate", block=len(self.sizes) - 1))
        return len(self.sizes) - 1


class CannotTraceError(ValueError):
    """The model's forward or backward cannot run on fake tensors."""


# ---------------------------------------------------------------- kernels of the target device

# Functions that compute an operator's workspace from its arguments, in bytes. A workspace is memory
# that a kernel allocates and frees while it runs, so the trace cannot see it. The backward of flash
# attention (arXiv 2307.08691, section 3.1.2) sums the gradient of the queries in float32.
_WORKSPACE: dict[str, Callable[..., int]] = {
    # The kernel writes the weight's gradient in its own memory layout first.
    "aten.convolution_backward": lambda _, x, weight, *rest: weight.nbytes,
    "aten._scaled_dot_product_flash_attention_backward": lambda _, q, *rest: 4 * q.numel(),
    "aten._scaled_dot_product_efficient_attention_backward": lambda _, q, *rest: 4 * q.numel(),
}


class _Kernels(TorchFunctionMode):
    """Calls the operators that torch would choose on an NVIDIA GPU.

    torch chooses some kernels, for example for attention, by the device. But the machine that makes
    the trace may have no GPU.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        if func is F.dropout and kwargs.get("training", True) and not kwargs.get("inplace"):
            return torch.native_dropout(args[0], args[1] if len(args) > 1 else kwargs["p"], True)[0]
        if func is F.rms_norm:
            # On fake tensors, torch would run five operators. So use the fused layer norm, which
            # saves the same tensors as CUDA's fused RMSNorm: the input, and one number per row.
            x, shape, weight = (*args, None)[:3]
            return torch.native_layer_norm(x, shape, kwargs.get("weight", weight), None, 1e-5)[0]
        return func(*args, **kwargs)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute scaled dot-product attention with the kernel that torch would choose on CUDA.

    Flash attention supports no masks, no float32, and no values that are wider or narrower than the
    queries (as in DeepSeek). The memory-efficient kernel supports all three, but no grouped
    queries. So for this kernel, keys and values are repeated.
    """
    if attn_mask is None and query.itemsize == 2 and query.shape[-1] == value.shape[-1]:
        flash = _aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (one.repeat_interleave(groups, -3) for one in (key, value))
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, 0)
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    efficient = _aten._scaled_dot_product_efficient_attention
    needs = torch.is_grad_enabled()
    return efficient(query, key, value, attn_mask, needs, dropout_p, is_causal, scale=scale)[0]


# ---------------------------------------------------------------- record


class _Recorder(TorchDispatchMode):
    """Records each operator, and when the memory of each tensor is allocated and freed."""

    def __init__(self, trace: StepTrace, persistent: set[int]) -> None:
        super().__init__()
        # `persistent`: addresses of the storages of parameters and buffers, which get no block.
        self._trace, self._persistent = trace, persistent
        # Index in `trace.sizes` of each storage's block, keyed by the address of the storage's C++
        # object.
        self._block_of: dict[int, int] = {}
        # `weakref.ref` of each storage: its callback records when the storage is freed.
        self._refs: dict[int, weakref.ref[Any]] = {}
        self.in_backward = False
        # The block that the last operator wrote if this operator was autograd's sum of two
        # gradients, and otherwise -1.
        self._sum = -1

    def observe(
        self, module: nn.Module, casts: UnitCasts, unit: PlannedUnit
    ) -> tuple[RemovableHandle, RemovableHandle]:
        """Record when a module's forward and backward begin and end. Returns the hooks' handles."""

        def mark(what: str, *_: Any) -> None:
            self._trace.events.append(Mark(what, unit.number))

        def enter(_: Any, args: Any, kwargs: Any) -> Any:
            mark("enter")
            args, kwargs = casts.cast_inputs(args, kwargs, is_root=not unit.name) or (args, kwargs)
            if not self.in_backward:
                for tensor in _with_gradients((args, kwargs)):
                    mark("input")
                    hook = tensor.register_hook(partial(mark, "leave backward"))
                    # Let autograd call this hook first, as in `Forward.before_module`: this mark
                    # must come before "enter backward" of the unit that made the tensor.
                    call_first(hook, tensor)
            return args, kwargs

        def leave(_: Any, __: Any, output: Any) -> Any:
            output = casts.cast_output(output)
            mark("leave")
            if not self.in_backward:
                for tensor in _with_gradients(output):
                    tensor.register_hook(partial(mark, "enter backward"))
            return output

        before = module.register_forward_pre_hook(enter, with_kwargs=True)
        return before, module.register_forward_hook(leave)

    def receive(self, flat: int, param: Tensor) -> None:
        """Record that a gradient is complete. ``flat``: index of the parameter's flat parameter."""
        assert param.grad is not None
        block = self._block_of[param.grad.untyped_storage()._cdata]
        self._trace.events.append(Mark("gradient", flat, block))
        param.grad = None

    def _allocate(self, tensor: Tensor, maker: str) -> bool:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._block_of or key in self._persistent:
            return False
        block = self._block_of[key] = self._trace.allocate(storage.nbytes(), maker)
        self._refs[key] = weakref.ref(storage, partial(self._free, key, block))
        return True

    def _free(self, key: int, block: int, _: object) -> None:
        del self._block_of[key], self._refs[key]
        # Autograd adds real gradients in place if possible, but fake gradients into a new tensor.
        # If a fake gradient is freed just after its addition, record that it is freed just before
        # the sum is allocated: then the sum needs no more memory than a sum in place.
        events, sizes, total = self._trace.events, self._trace.sizes, self._sum
        takes_over = total >= 0 and isinstance(events[-1], Op) and sizes[total] == sizes[block]
        events.insert(len(events) - 2 * takes_over, Mark("free", block=block))
        self._sum = -1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _aten._grouped_mm.default and args[0].dtype == torch.float32:
            # `_grouped_mm` accepts real tensors in float32, but not fake tensors in float32.
            out = func(*(one.bfloat16() for one in args[:2]), *args[2:], **kwargs).float()
        else:
            out = func(*args, **kwargs)
        if func.namespace == "prim":
            return out
        packet = func._overloadpacket
        name = f"{func.namespace}.{packet.__name__}"
        if "to_sparse" in func.__name__:  # the result's size depends on the values
            raise fake_tensor.DynamicOutputShapeException(func)
        # Leave out sparse tensors, which have no storage. All sparse tensors were made before the
        # step, because `to_sparse` raises above. The memory of sparse tensors is not counted.
        ins, outs = _strided((args, kwargs)), _strided(out)
        # Make a list first: `any` would stop at the first new tensor, and skip the next tensors.
        is_new = [self._allocate(one, name) for one in outs]
        if not (any(is_new) or func._schema.is_mutable):
            return out  # a view
        if packet is _aten.mkldnn_rnn_layer:
            # The last output is oneDNN's workspace for backward: about 15 numbers per element of
            # the first output (measured). The workspace's fake tensor is empty. In a trace for a
            # GPU, this operator stands for cuDNN's: assume that cuDNN's workspace is as large.
            self._trace.sizes[-1] = 15 * outs[0].nbytes
        if (workspace := _WORKSPACE.get(name)) is not None:
            block = self._trace.allocate(workspace(*args), name)
            self._trace.events.append(Mark("free", block=block))
        # torch's FLOP counter does not know attention kernels for CPUs. Such a kernel has the same
        # arguments as the CUDA kernel, so use the formula of the CUDA kernel.
        count = flop_registry.get(getattr(_aten, packet.__name__.replace("_for_cpu", ""), packet))
        flops = int(count(*args, **kwargs, out_val=out)) if count is not None else 0
        if func is _aten._grouped_mm.default:  # only one group's matrix multiplies each row
            flops = 2 * args[0].shape[-2] * args[0].shape[-1] * args[1].shape[-1]
        is_attention = flops > 0 and "attention" in packet.__name__
        if is_attention:
            given = dict(zip((one.name for one in func._schema.arguments), args, strict=False))
            if (given | kwargs).get("is_causal"):
                flops //= 2  # the kernel skips the half above the diagonal
        # Elements of an expanded tensor share memory, but `tensor.nbytes` counts each of them. So
        # take at most the size of the storage.
        nbytes = sum(min(one.nbytes, one.untyped_storage().nbytes()) for one in (*ins, *outs))
        self._trace.events.append(Op(name, flops, nbytes, is_attention))
        # If autograd has added two gradients, remember the memory block of the sum. Autograd adds
        # with gradients disabled. Additions with gradients enabled are part of a forward that a
        # checkpoint recomputes in backward.
        is_sum = func is _aten.add.Tensor and self.in_backward and not torch.is_grad_enabled()
        self._sum = self._block_of.get(out.untyped_storage()._cdata, -1) if is_sum else -1
        return out


def _strided(value: Any) -> list[Tensor]:
    return [t for t in tree_leaves(value) if isinstance(t, Tensor) and t.layout is torch.strided]


def _with_gradients(value: Any) -> list[Tensor]:
    """Return the tensors in ``value`` whose gradients autograd computes, without parameters."""
    return [t for t in tensors_in(value) if t.requires_grad and not isinstance(t, nn.Parameter)]


# ---------------------------------------------------------------- checkpointing


def selective_contexts() -> Any:
    """Return checkpoint contexts that save attention and every second matrix product.

    torchtitan's selective activation checkpointing uses the same rule.
    """
    counts: Counter[bool] = Counter()

    def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
        if func is _aten.mm.default or func is _aten.addmm.default:
            counts[context.is_recompute] += 1
            saves = counts[context.is_recompute] % 2 == 1
        else:
            saves = "attention" in func.__name__
        policies = checkpointing.CheckpointPolicy
        return policies.MUST_SAVE if saves else policies.PREFER_RECOMPUTE

    return checkpointing.create_selective_checkpoint_contexts(policy)


def checkpoint_blocks(modules: nn.Module | Iterable[nn.Module], kind: Checkpointing) -> None:
    """Apply activation checkpointing: backward recomputes the forward of each of ``modules``.

    If ``modules`` is a model, checkpointing is applied to the model's repeated blocks, such as the
    layers of a transformer.
    """
    if isinstance(modules, nn.Module) and not isinstance(modules, nn.ModuleList):
        modules = [*_repeated_blocks(modules)]
    keywords: dict[str, Any] = {"use_reentrant": False}
    if kind == "selective":
        keywords["context_fn"] = selective_contexts
    if kind != "none":
        for module in modules:
            forward = partial(checkpointing.checkpoint, module.forward, **keywords)
            module.forward = forward  # type: ignore[method-assign]


def _repeated_blocks(model: nn.Module) -> Iterator[nn.Module]:
    auto_wrap, inner = extra("auto_wrap", "checkpointing of repeated blocks"), set[nn.Module]()
    units = auto_wrap.AutoUnits(ModuleTree(model))
    for module in model.modules():
        if module not in inner and units.is_closed_block(module):
            inner.update(module.modules())
            yield module


# ---------------------------------------------------------------- trace


@contextlib.contextmanager
def _emptied(module: nn.Module, dtypes: dict[Any, torch.dtype]) -> Iterator[dict[Tensor, Tensor]]:
    """Inside the context, replace the tensors of a module by tensors without values.

    At the end of the context, all attributes of the module get their old values back.

    Yields the new tensors, keyed by the tensors that they replace. In a ``FakeTensorMode``, the new
    tensors are fake tensors. ``dtypes``: dtypes of the new tensors, if they differ from the old.
    """
    made: dict[Tensor, Tensor] = {}

    def replaced(value: Any) -> Any:
        if isinstance(value, list):
            return [*map(replaced, value)]
        if isinstance(value, Tensor) and value not in made:
            dtype, strides = dtypes.get(value, value.dtype), value.stride()
            new = torch.empty_strided(value.shape, strides, dtype=dtype, device="cpu")
            new = nn.Parameter(new) if isinstance(value, nn.Parameter) else new
            made[value] = new.requires_grad_(value.requires_grad)
        return made[value] if isinstance(value, Tensor) else value

    with contextlib.ExitStack() as stack:
        for own in [inner.__dict__ for inner in module.modules()]:
            for place in (own["_parameters"], own["_buffers"], own):
                # Callbacks run in reverse order: `clear` first, to drop attributes that were set in
                # the meantime (a checkpoint wrapper's `forward`, fake tensors).
                stack.callback(place.update, {**place})
                stack.callback(place.clear)
                # Look into lists, too: `nn.LSTM` computes with a list of its parameters.
                found = {k: replaced(v) for k, v in place.items() if isinstance(v, Tensor | list)}
                place.update(found)
        yield made


@contextlib.contextmanager
def _explained(found: StepTrace) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, AttributeError, IndexError, KeyError, AssertionError) as error:
        what, wanted = "the step fails", "passes inputs of the right shapes and dtypes"
        frames = traceback.extract_tb(error.__traceback__)
        if isinstance(error, _NEEDS_VALUES):
            what = "the step needs real values, which fake tensors lack,"
            wanted = "avoids this: with an input, mask or routing that was made before the step"
        elif isinstance(error, fake_tensor.UnsupportedOperatorException):
            what = "the step needs an operator without a rule for fake tensors,"
            wanted = "avoids the operator, or register a rule: torch.library.register_fake"
        elif any(one.name == "unpack_hook" for one in frames):
            what = "a checkpointed forward differs when backward recomputes it,"
            wanted = "passes use_cache=False to the model, if a cache of keys and values grows"
        # "<": also skip generated code, whose file name begins with "<".
        ours = ("/torch/", "/flatshard/", "contextlib.py", "<")
        lines = [one for one in frames if not any(part in one.filename for part in ours)]
        if lines:
            place = f"at {lines[-1].filename}:{lines[-1].lineno} ({lines[-1].line})"
        else:  # autograd's own C++ code has raised, so no line of the program is known
            # If no unit's backward has begun, take the last unit, which is the root.
            units = [-1, *(one[1] for one in found.events if one[0] == "enter backward")]
            place = f"in the backward of {unit_text(found.names[units[-1]])}"
        reason = f"{f'{error}'.partition(chr(10))[0]:.300}".rstrip(".")
        raise CannotTraceError(f"{what} {place}: {reason}. Pass a `step` that {wanted}.") from error


_NEEDS_VALUES = fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException


# Names of functions of torch and transformers that read the values of tensors. Fake tensors have no
# values. So while a step is traced, the function on the right runs instead.
_STAND_INS: dict[str, Any] = {
    # This function raises an error if a tensor has invalid values. Assume valid values.
    "torch._check_tensor_all_with": lambda *_: None,
    # This function says whether a mask of `nn.Transformer` is causal. Assume that every mask is
    # causal, because most masks are.
    "torch.nn.modules.transformer._detect_is_causal_mask": lambda mask, is_causal=None, size=None: (
        mask is not None if is_causal is None else is_causal
    ),
    # This function finds rows that contain several sequences. Assume one sequence in each row.
    "transformers.masking_utils.find_packed_sequence_indices": lambda _: None,
    # This function returns the random states of GPUs, which activation checkpointing restores for
    # the recomputation. A fake tensor cannot be a random state, so return no states.
    "torch.utils.checkpoint.get_device_states": lambda *_: ([], []),
    # Silence torch, which would print a traceback for an error in a rule for fake tensors.
    "torch._subclasses.fake_tensor.log": logging.Logger("silent", logging.CRITICAL + 1),
}


def trace(
    plan: ModelPlan, flats: list[FlatMemory], step: Step, *, on_gpu: bool, checkpoint: Checkpointing
) -> StepTrace:
    """Run ``step(model).backward()`` on fake tensors, and return the recorded trace."""
    model, casts = plan.module, plan.precision_plan
    casts.install()
    found = StepTrace(plan)
    dtypes = {param: flat.compute_dtype for flat in flats for param in flat.params}
    # Accept real tensors, too: `step` may use inputs that were made before the trace.
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with contextlib.ExitStack() as stack:
        with mode:
            fakes = stack.enter_context(_emptied(model, dtypes))
        checkpoint_blocks(model, checkpoint)
        recorder = _Recorder(found, {one.untyped_storage()._cdata for one in fakes.values()})
        for unit in plan.units:
            for module in (member.module for member in unit.members):
                for handle in recorder.observe(module, casts.of_unit(module), unit):
                    stack.callback(handle.remove)
        for index, flat in enumerate(flats):
            for param in (fakes[one] for one in flat.params if one.requires_grad):
                param.register_post_accumulate_grad_hook(partial(recorder.receive, index))
        for name, stand_in in _STAND_INS.items():
            place, _, attribute = name.rpartition(".")
            if (owner := sys.modules.get(place)) is not None:
                stack.callback(setattr, owner, attribute, getattr(owner, attribute))
                setattr(owner, attribute, stand_in)
        stack.enter_context(mode)
        stack.enter_context(_explained(found))
        if on_gpu:
            stack.enter_context(_Kernels())
        stack.enter_context(recorder)
        loss = step(model)
        if not (isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad):
            got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise TypeError(
                "plan: expected `step` to return the loss, a tensor with one element that requires "
                f"a gradient, got {got}."
            )
        recorder.in_backward = True
        found.events.append(Mark("backward"))
        # `loss.backward()` would turn `_Kernels` off. But checkpoints recompute forwards during
        # backward, and these forwards must choose the same kernels.
        torch.autograd.Variable._execution_engine.run_backward(
            (loss,), (torch.ones_like(loss),), False, False, (), True, True
        )
        del loss
    return found
