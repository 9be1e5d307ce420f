"""Memory of tensors: unsharded buffers and their pages, mapped files, and offload targets."""
