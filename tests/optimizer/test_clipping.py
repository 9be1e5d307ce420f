"""Gradient norms and clipping: torch's numbers on the unwrapped model and the rows of all ranks."""

import math
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatshard import FlatShardTensor, ShardedWrapper, collectives, sharded_modules
from flatshard.comm.communicator import Communicator
from flatshard.comm.ranks import communicator
from flatshard.tensor import operators
from flatshard.tensor.shard_spec import ShardSpec
from flatshard.units.layout import LocalSpan, ParamSpan
from flatshard.wrap import ModuleWrapPolicy
from tests.harness import assert_raises, naming, on_ranks
from tests.ways import BASIC, WAYS, on_ranks_each_way

pytestmark = pytest.mark.by_turns

INF = math.inf
ORDERS = (2.0, 1.0, 3.0, 0.5, INF, -INF, 0.0, -1.0)


class Part(nn.Module):
    """A linear function of odd-sized parameters of several dtypes, with exact gradients."""

    def __init__(self, *kinds: tuple[tuple[int, ...], torch.dtype]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(shape, dtype=dtype) for shape, dtype in kinds)
        for index, weight in enumerate(self.weights):
            slope = torch.arange(1.0, weight.numel() + 1).view(weight.shape)
            self.register_buffer(f"slope{index}", slope.double() * (-1) ** index)

    def forward(self, x: Tensor) -> Tensor:
        slopes = (getattr(self, f"slope{index}") for index in range(len(self.weights)))
        pairs = zip(self.weights, slopes, strict=True)
        return x * sum((weight.double() * slope).sum() for weight, slope in pairs)


class Parts(nn.Module):
    """Parts of which each becomes a unit; ``idle`` is not used, ``plain`` may come later."""

    def __init__(self) -> None:
        super().__init__()
        f32, bf16, f64 = torch.float32, torch.bfloat16, torch.float64
        self.single = Part(((5, 3), f32), ((), f32), ((2,), f32))
        self.mixed = Part(((7,), bf16), ((2, 2), f64), ((3,), bf16))
        self.low = Part(((3, 3), bf16), ((2,), bf16))
        self.idle = Part(((3,), f32))

    def forward(self, x: Tensor) -> Tensor:
        return self.single(x) + self.mixed(x) + self.low(x)


def _wrapped(way: str) -> ShardedWrapper:
    return ShardedWrapper(Parts(), auto_wrap_policy=ModuleWrapPolicy((Part,)), **WAYS[way].keywords)


class Pair:
    """The same model, plain and wrapped in one of the ways, on the same rows."""

    def __init__(self, rank: int, world_size: int, way: str) -> None:
        self.rank, self.world_size = rank, world_size
        self.plain, self.wrapped = Parts(), _wrapped(way)
        self.both = self.plain, self.wrapped
        for root in (self.plain, self.wrapped.module):  # as a user may add one that no unit owns
            param = nn.Parameter(torch.ones(3), requires_grad=False)
            root.register_parameter("plain", param)
        self._start = {name: value.clone() for name, value in self.plain.state_dict().items()}

    def backward(self) -> None:
        """From the weights of the beginning; means over the rows are powers of two."""
        rows = torch.tensor([[0.25, 0.75]], dtype=torch.float64).repeat(self.world_size, 1)
        for model, x in ((self.plain, rows), (self.wrapped, rows[self.rank])):
            model.load_state_dict(self._start)
            model.zero_grad()
            (model(x) * 0.5).mean().backward()
            plain_param = getattr(model, "module", model).get_parameter("plain")
            plain_param.grad = torch.tensor([0.5, -2.0, 1.0])

    def set_slope(self, value: float) -> None:
        """Let one element of one gradient, which the last rank holds, be something special."""
        for model in self.both:
            getattr(model, "module", model).get_submodule("single").slope2[1] = value

    def assert_same_gradients(self) -> None:
        """Seen by a step of plain SGD."""
        for model in self.both:
            torch.optim.SGD(model.parameters(), lr=1.0).step()
        actual = self.wrapped.state_dict()
        for name, value in self.plain.state_dict().items():
            _assert_close(actual[name], value)


def _spec(name: str, whole: Tensor, start: int, numel: int, comm: Communicator) -> ShardSpec:
    """Of a parameter like ``whole``, 1-D, of which this rank has the range from ``start`` on."""
    span = ParamSpan(name, tuple(whole.shape), 0, whole.numel(), (0,))
    return ShardSpec(name, "unit", span, LocalSpan(0, numel, start), comm=comm)


def _assert_close(actual: Tensor, expected: Tensor) -> None:
    """To the last places of the result's dtype, or of float32, which its parts have seen."""
    eps = 4 * max(torch.finfo(dtype).eps for dtype in (expected.dtype, torch.float32))
    torch.testing.assert_close(actual, expected, rtol=eps, atol=eps, equal_nan=True)


# ---------------------------------------------------------------- the numbers


@pytest.mark.parametrize(
    ("way", "world_size"), [*((way, 2) for way in BASIC), ("full", 1), ("full", 3), ("full", 4)]
)
@on_ranks()
def test_method(rank: int, world_size: int, way: str) -> None:
    pair = Pair(rank, world_size, way)
    is_sharded = world_size > 1 and WAYS[way].strategy != "NO_SHARD"
    for order in ORDERS:
        with naming(f"order {order}"):
            pair.backward()
            params = [param for param in pair.plain.parameters() if param.grad is not None]
            max_norm = 0.3 * float(nn.utils.get_total_norm([one.grad for one in params], order))
            expected = nn.utils.clip_grad_norm_(params, max_norm, order)
            with collectives.record() as events:
                actual = pair.wrapped.clip_grad_norm_(max_norm, order)
            _assert_close(actual, expected)
            assert [event.kind for event in events] == ["scalars"] * is_sharded
            pair.assert_same_gradients()


@on_ranks_each_way(2)
def test_torch_functions(rank: int, world_size: int, way: str) -> None:
    pair = Pair(rank, world_size, way)
    for foreach in (True, False, None):
        for order in ORDERS:
            with naming(f"order {order}, foreach={foreach}"):
                pair.backward()
                arguments = 3.0, order, False, foreach
                plain, wrapped = (
                    nn.utils.clip_grad_norm_(one.parameters(), *arguments) for one in pair.both
                )
                _assert_close(wrapped, plain)
                pair.assert_same_gradients()
        with naming(f"value, foreach={foreach}"):
            pair.backward()
            for model in pair.both:
                nn.utils.clip_grad_value_(model.parameters(), 1.5, foreach)
            pair.assert_same_gradients()
        with naming(f"in two steps, foreach={foreach}"):
            pair.backward()
            for model in pair.both:
                grads = [p.grad for p in model.parameters() if p.grad is not None]
                total = nn.utils.get_total_norm(grads, foreach=foreach)
                nn.utils.clip_grads_with_norm_(model.parameters(), 2.0, total, foreach)
            pair.assert_same_gradients()


# ---------------------------------------------------------------- not finite


@pytest.mark.parametrize("value", [math.nan, INF])
@on_ranks_each_way(2)
def test_not_finite(rank: int, world_size: int, way: str, value: float) -> None:
    pair = Pair(rank, world_size, way)
    pair.set_slope(value)
    for order in ORDERS:
        with naming(f"order {order}"):
            pair.backward()
            expected = nn.utils.clip_grad_norm_(pair.plain.parameters(), 1.0, order)
            _assert_close(pair.wrapped.clip_grad_norm_(1.0, order), expected)
            pair.assert_same_gradients()
            pair.backward()
            _assert_close(nn.utils.clip_grad_norm_(pair.wrapped.parameters(), 1.0, order), expected)
            if not expected.isfinite():
                pair.backward()
                clip_all = partial(nn.utils.clip_grad_norm_, list(pair.wrapped.parameters()))
                for clip in (clip_all, pair.wrapped.clip_grad_norm_):
                    with pytest.raises(RuntimeError, match=r"norm of order .* is non-finite"):
                        clip(1.0, order, True)


# ---------------------------------------------------------------- not reduced


@on_ranks_each_way(2)
def test_not_reduced(rank: int, world_size: int, way: str) -> None:
    model = _wrapped(way)
    x = torch.ones(2, dtype=torch.float64)
    with model.no_sync():
        model(x).sum().backward()
        # A reduction here would leave the ranks waiting for each other.
        for one, name in ((model, "single"), (sharded_modules(model.mixed)[0], "mixed")):
            with pytest.raises(RuntimeError, match=rf"unit '{name}', rank 0: .*no_sync"):
                one.clip_grad_norm_(1.0)
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        for foreach in (True, False):
            if isinstance(grads[0], FlatShardTensor):
                with pytest.raises(RuntimeError, match=rf"unit '\w+', .*rank {rank}: .*no_sync"):
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=foreach)
        model.zero_grad()
        assert model.clip_grad_norm_(1.0).item() == 0
        model(x).sum().backward()
    model(x).sum().backward()
    assert model.clip_grad_norm_(1.0).item() > 1
    # Reduced ones, to which some that are not reduced belong.
    with model.no_sync():
        model(x).sum().backward()
    assert_raises(RuntimeError, r"unit 'single', rank 0: .*no_sync", model.clip_grad_norm_, 1.0)


@on_ranks(2)
def test_not_reduced_on_one_rank(rank: int, world_size: int) -> None:
    """The other one has no gradient at all, and raises as well."""
    model = ShardedWrapper(Parts())
    with model.no_sync():
        loss = model(torch.ones(2, dtype=torch.float64)).sum()
        (loss if rank == 1 else loss.detach().requires_grad_()).backward()
        assert_raises(RuntimeError, r"the root unit, rank 1: .*no_sync", model.clip_grad_norm_, 1.0)


# ---------------------------------------------------------------- uneven and empty parts


@on_ranks(3)
def test_reductions_of_uneven_parts(rank: int, world_size: int) -> None:
    """However elements lie on the ranks: nothing on some, a NaN on one, padding between them."""
    comm = communicator(dist.group.WORLD)
    generator = torch.Generator().manual_seed(5)
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.complex128)
    for trial in range(40):
        wholes, parts = [], []
        for position in range(1 + trial % 5):
            dtype = dtypes[_draw(len(dtypes), generator)]
            whole = torch.randn(1 + _draw(6, generator), generator=generator).to(dtype)
            special = (None, math.nan, INF, 0.0, 1e3)[_draw(5, generator)]
            if special is not None:
                whole[_draw(whole.numel(), generator)] = special
            cuts = sorted(_draw(whole.numel() + 1, generator) for _ in range(world_size - 1))
            start, end = ([0, *cuts][rank], [*cuts, whole.numel()][rank])
            spec = _spec(f"p{position}", whole, start, end - start, comm)
            wholes.append(whole)
            parts.append(FlatShardTensor(whole[start:end].clone(), spec))
        for order in ORDERS:
            with naming(f"trial {trial}, order {order}: {wholes}"):
                found = operators.norms([*parts, wholes[0].abs()], order)
                for norm, whole in zip(found, [*wholes, wholes[0]], strict=True):
                    _assert_close(norm, torch.linalg.vector_norm(whole.abs(), order))
        for whole, part in zip(wholes, parts, strict=True):
            if not whole.is_complex():
                with naming(f"trial {trial}: {whole}"):
                    assert torch.equal(part.max().nan_to_num(), whole.max().nan_to_num())
                    assert torch.equal(part.amin().isnan(), whole.amin().isnan())


def _draw(end: int, generator: torch.Generator) -> int:
    return int(torch.randint(end, (), generator=generator))


@on_ranks(2)
def test_wide_sums(rank: int, world_size: int) -> None:
    """Sums that the dtype cannot hold, on the way to numbers that it can."""
    for value, dtype in ((6000.0, torch.float16), (1e25, torch.float32)):
        (param,) = ShardedWrapper(Part(((8, 8), dtype))).parameters()
        plain = torch.full((8, 8), value, dtype=dtype)
        with torch.no_grad():
            param.copy_(plain)
            for measure in (torch.mean, torch.linalg.vector_norm):
                torch.testing.assert_close(measure(param), measure(plain))


@on_ranks(2)
def test_slope_of_a_norm(rank: int, world_size: int) -> None:
    """Zeros under a root have the slope zero, a NaN shows in every element."""
    for order in (0.5, 1.0, 2.0, 3.0):
        for special in (0.0, math.nan):
            wrapped = ShardedWrapper(Part(((5,), torch.float64)))
            (param,) = wrapped.parameters()
            plain = torch.arange(5.0, dtype=torch.float64)
            plain[3] = special
            with torch.no_grad():
                param.copy_(plain)
            plain.requires_grad_()
            with warnings.catch_warnings(action="ignore"):  # that it is all-gathered for this
                for tensor in (param, plain):
                    torch.linalg.vector_norm(tensor, order).backward()
            _assert_close(param.grad.full_tensor(), plain.grad)
