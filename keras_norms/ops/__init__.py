"""Pure functions on arrays: no layer, no state."""
