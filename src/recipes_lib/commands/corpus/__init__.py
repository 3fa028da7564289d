"""Commands that prepare the steps of a corpus."""
