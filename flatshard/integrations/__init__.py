"""Support for frameworks. Each module lets one framework train models with flatshard."""
