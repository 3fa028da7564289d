"""Migration of configurations of TRL, alignment-handbook and older versions: keys, methods, datasets."""
