"""Full and sharded state dicts, and full parameters in place of sharded ones."""
