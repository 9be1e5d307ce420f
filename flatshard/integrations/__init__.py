"""Frameworks that train with flatshard; each module imports its own framework."""
