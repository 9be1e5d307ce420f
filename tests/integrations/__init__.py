"""Programs of other frameworks on sharded models; each import of a framework takes seconds."""

PRELOAD = (
    "flatshard.integrations.lightning",
    "flatshard.integrations.transformers",
    "transformers.models.llama.modeling_llama",
    "trl",
)
"""What the fork server of these tests loads once. All of them run in one worker of pytest-xdist."""
