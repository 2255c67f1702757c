"""From a checkpoint folder and an observation to the robot's actions."""
