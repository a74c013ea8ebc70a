import pytest

from recipes.spheres import pruning, robustness, weight_growth


@pytest.mark.parametrize(
    "recipe, setting, value, message",
    [
        (weight_growth, "weight_decays", (-1.0,), "must be at least 0"),
        (robustness, "epsilon", 0.0, "must be positive"),
        (robustness, "epsilon_2", 0.0, "must be positive"),
        (robustness, "noise", 0.0, "must be positive"),
        (robustness, "steps", 0, "must be at least 1"),
        (pruning, "measure_size", 0, "must be at least 1"),
        (pruning, "levels", (0.1, 1.1), "must be at most 1"),
        (pruning, "saved_models_dir", None, "must be of type str"),
        (pruning, "dataset", "digit", "must be one of digits"),
    ],
)
def test_bad_settings(tmp_path, recipe, setting, value, message):
    with pytest.raises(ValueError, match=f"`{setting}` {message}"):
        recipe.run(recipe.Settings(**{setting: value}, runs_dir=str(tmp_path)))
    assert not list(tmp_path.iterdir())
