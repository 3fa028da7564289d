"""Tokenised, packed datasets: preparation, storage on disk, auditing, collation."""
