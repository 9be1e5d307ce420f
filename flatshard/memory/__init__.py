"""Memory of tensors: unsharded buffers, the page pool, mapped files, and offload targets."""
