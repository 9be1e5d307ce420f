"""Scripts written for other wrappers, and that they train the same with flatshard."""
