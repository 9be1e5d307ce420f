"""Planning: to which unit each parameter belongs, and its position in a flat parameter."""
