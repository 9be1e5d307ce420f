"""Whoever listens to a step: reports, plans, checks."""
