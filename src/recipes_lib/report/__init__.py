"""Curves, tables and samples of a run as one HTML file and PNGs."""
