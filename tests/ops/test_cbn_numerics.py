from tests.support.normalizations import batch, quadratic_loss  # noqa: F401
