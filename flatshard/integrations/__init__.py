"""Support for frameworks: each module imports one framework, which trains with flatshard."""
