"""A module in two wrappers: refused where it trains. What works is in `tests/idioms`."""

import gc
import weakref

import pytest

from flatshard import ShardedWrapper
from tests.idioms.side import ROWS, Side
from tests.idioms.together import Headed, Net
from tests.ways import on_ranks_each_way

pytestmark = pytest.mark.by_turns


@on_ranks_each_way(2)
def test_a_trained_unit_in_two_outermost_wrappers(rank: int, world_size: int, way: str) -> None:
    side = Side(f"flatshard {way}")
    two = "is trained, and is also in another .* .around a Headed."
    remedy = "models = ShardedWrapper.nn.ModuleList"
    encoder = side.wrap(Net())
    encoder(side.draw(0, ROWS, 7)).sum().backward()  # has been trained as a model of its own
    actor = side.wrap_whole(Headed(encoder))
    with pytest.raises(ValueError, match=f"{two}.*{remedy}"):
        side.wrap_whole(Headed(encoder))
    # The error about a policy must not recommend two wrappers.
    with pytest.raises(ValueError, match=f"{two}.*{remedy}"):
        ShardedWrapper(Headed(encoder), auto_wrap_policy="auto")
    side.loss(actor, 0).backward()
    encoder.requires_grad_(False)
    critic, third = side.wrap_whole(Headed(encoder)), side.wrap_whole(Headed(encoder))
    for model in (actor, critic, third):
        side.loss(model, 0).backward()
    encoder.requires_grad_(True)
    for model in (actor, critic, encoder):
        with pytest.raises(ValueError, match=f"Headed.*{remedy}"):
            model(side.draw(0, ROWS, 7))
    # Without the other wrappers, the encoder belongs to the last one, whichever that is.
    freed = [weakref.ref(actor), weakref.ref(critic)]
    del actor, critic, model
    side.loss(third, 0).backward()
    assert [one() for one in freed] == [None, None]
    assert all(param.grad is not None for param in third.parameters())
    freed = [weakref.ref(third)]
    del third
    gc.collect()
    assert freed[0]() is None, "the encoder must not keep a model that was dropped"
    side.loss(side.wrap_whole(Headed(encoder)), 0).backward()


@on_ranks_each_way(2)
def test_an_unwrapped_module_in_two_wrappers(rank: int, world_size: int, way: str) -> None:
    side, encoder = Side(f"flatshard {way}"), Net()
    first = side.wrap(Headed(encoder), Net)
    expected = "parameter 'encoder.*' is already in another ShardedWrapper.*ModuleList"
    with pytest.raises(ValueError, match=expected):
        side.wrap(Headed(encoder))
    for again in (first, first.module):
        with pytest.raises(ValueError, match=r"ModuleList|already a ShardedWrapper"):
            side.wrap(again)
    side.loss(first, 0).backward()
