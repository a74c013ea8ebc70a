"""Checks of arguments, for layers, surgery and diagnostics alike."""
