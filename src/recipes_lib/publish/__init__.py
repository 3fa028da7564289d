"""Final model, model card, adapter merging, and publishing to the Hub."""
