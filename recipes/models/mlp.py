"""A multilayer perceptron: three hidden Dense layers of one width."""

from keras import Model, layers


def mlp(units, input_shape, num_classes, norm, activation):
    """Builds the network, from `(batch, *input_shape)` to logits.

    Args:
        units: Positive integer, the width of each hidden layer.
        input_shape, num_classes, activation: See `recipes.models.build`.
        norm: A `recipes.models.norms.Norm`.
    """
    inputs = layers.Input(input_shape, name="image")
    x = layers.Flatten(name="flatten")(inputs)
    for index in range(1, 4):
        name = f"dense{index}"
        if index > 1:
            x = norm.before(x, name)
        dense = layers.Dense(
            units, use_bias=norm.use_bias, kernel_initializer="he_normal", name=name
        )
        x = norm.after(norm.convolution(dense)(x), name)
        x = layers.Activation(activation, name=f"{name}_activation")(x)
    x = norm.before(x, "logits")
    x = layers.Dense(num_classes, kernel_initializer="he_normal", name="logits")(x)
    return Model(inputs, x, name=f"mlp{units}")
