"""Shared by diagnostics: the loss of a model as a function, and its derivatives."""
