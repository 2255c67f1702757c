"""The catalogue: which datasets exist, where they lie and what their numbers mean."""
