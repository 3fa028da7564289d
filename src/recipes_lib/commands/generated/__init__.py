"""Commands whose rows models write: comparison of answers by a judge, and synthetic training data."""
