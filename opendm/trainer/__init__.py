"""The training loop. It knows an experiment by a protocol and neither model nor data by name."""
