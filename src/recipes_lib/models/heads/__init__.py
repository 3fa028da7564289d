"""Model heads: chunked vocabulary loss, reward score."""
