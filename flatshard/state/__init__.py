"""Full and sharded state dicts of models and optimizers."""
