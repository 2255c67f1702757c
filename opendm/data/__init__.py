"""Episodes, transforms, statistics and batches. Importing this package imports no framework."""
