"""What ``recipes check`` finds out about a run, stage by stage."""
