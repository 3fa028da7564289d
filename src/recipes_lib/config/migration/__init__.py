"""Rewriting configurations of TRL, alignment-handbook and older versions: renamed keys, methods, datasets."""
