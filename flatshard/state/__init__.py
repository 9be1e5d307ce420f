"""Full and sharded state dicts, and ``summon_full_params``."""
