"""Names and numbers shared by every layer above."""
