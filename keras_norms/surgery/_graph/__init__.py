"""What the surgeries share: a model as a graph, and how it is read and edited."""
