"""Tests of `flatshard.extras.page_pool`."""
