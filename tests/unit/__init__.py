"""Tests without a process group."""
