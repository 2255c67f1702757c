"""Closed-loop evaluation in Meta-World (Yu et al. 2019, arXiv:1910.10897), with controls.

Nothing here imports the simulator before a command has checked that it can run.
"""
