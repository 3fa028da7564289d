"""Planning commands: memory and time of a run, search for the best layout, and scaling laws."""
