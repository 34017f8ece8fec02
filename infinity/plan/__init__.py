"""What happens when, as values: no torch, no files, no memory."""
