"""The user's options, each validated once: when it is made, or when a model is wrapped with it."""
