"""Experiments of the papers: one file, one claim, one command."""
