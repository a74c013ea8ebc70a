"""What diagnostics share: the loss of a model as a function, and its derivatives."""
