"""Parts of `published_runs.py`: rows, models, and torch's FSDP."""
