"""Experiments: the configuration tree, and what runs it."""
