"""Modules of `published_runs.py`: rows of the table, models, and a replay of torch's FSDP."""
