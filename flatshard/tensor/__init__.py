"""The true-shape sharded parameter and its operators."""
