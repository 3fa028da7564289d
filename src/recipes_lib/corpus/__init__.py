"""From raw text to a clean corpus: datatrove pipelines of steps that count what they remove."""
