"""Keras layers: state, configuration, shapes. Mathematics is in `keras_norms.ops`."""
