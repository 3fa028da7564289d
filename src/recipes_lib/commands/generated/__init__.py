"""Commands with generating models: synthetic training data, comparison by a judge, stored teacher probabilities."""
