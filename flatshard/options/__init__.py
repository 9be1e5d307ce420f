"""The user's options. They are validated once, when a model is wrapped or an option is made."""
