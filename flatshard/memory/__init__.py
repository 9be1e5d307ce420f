"""Memory for tensors: buffers, page pool, mapped files, and offload targets."""
