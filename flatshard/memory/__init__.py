"""Memory of tensors: unsharded buffers, results, and offload targets."""
