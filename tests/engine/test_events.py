"""What watches a step comes last: an error of it must not keep another rank waiting."""

from flatshard.engine.events import StepExtension
from flatshard.options.extras import EXTRAS, default_extra


def test_watchers_come_last() -> None:
    """A watcher may raise its warning as an error: no rank may wait for this rank then."""
    found: list[type[StepExtension]] = []
    for name in EXTRAS:
        module = default_extra(name)
        kinds = [one for one in vars(module).values() if isinstance(one, type)]
        found += [
            one
            for one in kinds
            if issubclass(one, StepExtension) and one.__module__ == module.__name__
        ]
    acting = [one for one in found if not one.watches and "end_backward" in vars(one)]
    watching = [one for one in found if one.watches]
    assert acting
    assert watching
    assert max(map(found.index, acting)) < min(map(found.index, watching))
