"""Options of state dicts; see ``flatshard.state.model_state``."""

from flatshard.state.model_state import options_of, options_set, without_ddp_prefix

__all__ = ["options_of", "options_set", "without_ddp_prefix"]
