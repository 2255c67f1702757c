"""How good a trained policy is: open-loop error on held-out episodes, and the report of a run."""
