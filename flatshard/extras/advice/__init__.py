"""Extra: when a model is wrapped, warns of settings without effect, and of large units.

Without this folder, there are no such warnings.
"""

from collections import Counter

from flatshard.module.model_plan import ModelPlan
from flatshard.options.extras import default_extra
from flatshard.units.module_proxy import ModuleProxy
from flatshard.units.module_tree import ModuleTree, numel
from flatshard.units.policies import Policy, show

__all__ = ["about", "explain_no_match"]


def about(plan: ModelPlan) -> list[str]:
    """Return warnings about a plan, for rank 0: settings without effect, and large units."""
    module, settings, ignored = plan.module, plan.settings, plan.ignored
    chosen, offload = plan.precision_plan.chosen, settings.cpu_offload
    found = chosen.warnings() if chosen else []
    # "auto" keeps a small model in one unit on purpose.
    if settings.auto_wrap_policy not in (None, "auto") and not plan.chosen:
        found.append(explain_no_match(plan.tree, settings.auto_wrap_policy))
    if module in ignored.modules:
        found.append(
            "ShardedWrapper: the wrapped module itself is ignored, so no parameter is sharded. "
            "Leave the module out of ignored_modules and ignored_states."
        )
    modules = {*plan.settings_of, *plan.sharded_before}
    if plan.divergent and plan.divergent.isdisjoint(modules):
        found.append(
            "allow_divergence has no effect, because none of the given modules is a unit: their "
            "parameters belong to outer units. Make the modules units (auto_wrap_policy)."
        )
    if ignored.is_elsewhere:
        found.append(
            "ignored_modules, ignored_states: none of the given modules and parameters is in the "
            f"wrapped {type(module).__name__}, so nothing is ignored. Pass modules of the wrapped "
            "model."
        )
    if isinstance(module, ModuleProxy):
        found.append(
            f"ShardedWrapper: the module, a {module.module.__class__.__name__}, is in a "
            "ShardedWrapper already, and the outer wrapper adds nothing. Wrap the module once, "
            "with all settings."
        )
    if offload.is_on and not offload.path and settings.device.type == "cpu":
        found.append("cpu_offload has no effect on parameters in CPU memory. Omit cpu_offload.")
    # Read the topology of the root unit. With `allow_divergence=True`, `settings.topology` may make
    # process groups, which is collective, but this function runs only on rank 0.
    num_shards = plan.units[-1].settings.topology.shard.size
    if settings.auto_wrap_policy is None and num_shards > 1 and not plan.sharded_before:
        if auto_wrap := default_extra("auto_wrap"):
            found += auto_wrap.one_unit_warning(plan.tree)
    return found


def explain_no_match(tree: ModuleTree, policy: Policy | None) -> str:
    """Return a warning that the policy chose no module, with the classes of possible units."""
    by_class: Counter[str] = Counter()
    for module in tree.candidates():
        by_class[type(module).__name__] += numel(tree.params(module))
    options = [f"{name} ({count:,} elements)" for name, count in by_class.most_common(5)]
    return (
        f"auto_wrap_policy: {show(policy)} chose no module of {type(tree.module).__name__}, so "
        f"all {numel(tree.params(tree.module)):,} elements of the model are one unit and are "
        "unsharded together. A policy could choose these classes, largest first: "
        f"{', '.join(options) or 'none'}."
    )
