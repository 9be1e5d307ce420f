"""``CollectiveError``."""


class CollectiveError(RuntimeError):
    """A collective failed: a peer died, ran other units, or did not come within the timeout."""
