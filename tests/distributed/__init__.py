"""Tests on real gloo ranks."""
