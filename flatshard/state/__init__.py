"""Full and sharded state dicts, summoned parameters, checkpoints."""
