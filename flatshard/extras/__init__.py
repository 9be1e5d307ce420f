"""Extras: each folder here adds one thing to the core, and can be deleted.

The core finds extras through the table ``EXTRAS`` in ``flatshard.options.extras``.
"""
