"""Tests of extras; each folder is deleted with its extra."""
