"""Models. Importing this package imports no framework."""
