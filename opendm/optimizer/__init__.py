"""Optimizers and the choice of parameters that each one gets."""
