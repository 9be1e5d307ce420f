"""The tests of flatshard; a package, because ranks import their functions by module name."""
