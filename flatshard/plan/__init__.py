"""Who owns what and where it lies, before a tensor is touched."""
