"""Objectives as pure tensor functions, one a file."""
