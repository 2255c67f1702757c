"""DM0.5: a Gemma 3 vision-language model whose keys and values an Action Expert reads."""
