"""What would fail later, found before training: records, pictures, numbers, prompts, one batch."""
