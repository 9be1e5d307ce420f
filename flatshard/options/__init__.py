"""The user's options.

Each option is validated once: when the option is made, or passed to a wrapper.
"""
