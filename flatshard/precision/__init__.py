"""Casts around modules and on the wire."""
