"""Files of tensors: safetensors, and what other libraries write. Pure: no ranks."""
