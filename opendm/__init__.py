"""OpenDM: train, evaluate and run DM0.5 vision-language-action policies."""
