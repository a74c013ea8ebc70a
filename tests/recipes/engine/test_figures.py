import pytest

from recipes.engine import figures


def assert_pictures(directory, *names):
    for name in names:
        content = (directory / f"{name}.png").read_bytes()
        assert content.startswith(b"\x89PNG")


def test_a_norm_has_one_colour_everywhere():
    first = figures.colours(["cbn", "bn"])
    second = figures.colours(["lp1", "bn", "group", "cbn"])
    assert first["bn"] == second["bn"] and first["cbn"] == second["cbn"]
    assert len(set(second.values())) == 4
    many = figures.colours([*reversed(figures.COLOUR_OF), "wn", "ws"])
    assert many["bn"] == first["bn"] and many["cbn"] == first["cbn"]
    assert len(many) == len(figures.COLOUR_OF) + 2


def test_shades_have_an_order():
    greens = [green for _, green, _, _ in figures.shades(["a", "b", "c"]).values()]
    assert greens == sorted(greens)


@pytest.mark.parametrize("runs", [[], [[]], [[{"epoch": 1, "v": None}]]])
def test_nothing_to_draw(tmp_path, runs):
    rows = [("v", "values", {})]
    figures.curves(tmp_path / "x.png", {"a": {"bn": runs}}, rows, "title")
    outcomes = {"a": {"bn": {1.0: [], 2.0: [0.1] * 3}}}
    figures.against(tmp_path / "y.png", outcomes, "x", "y", "title", base=2)
    assert_pictures(tmp_path, "x", "y")


def test_some_of_which_there_is_nothing_to_draw(tmp_path):
    panels = {"relu": {"layer 1": [[0.1, 0.5], [1.0]], "layer 2": []}}
    figures.distributions(tmp_path / "x.png", panels, (0, 1), "v", "title", (-1, 2))
    ours = [{"mean": 1.0, "std": 0.1}, None]
    values = {"ours": ours, "theirs": [None, {"mean": 2.0, "std": None}]}
    figures.steps(tmp_path / "y.png", {"relu": values}, ["1", "2"], "title")
    rates = {0.1: {"relu": {"bn": [[{"gradient_norm": 1.0}]]}}, 1.0: {"relu": {}}}
    figures.gradient_norms(tmp_path / "z.png", rates, "title")
    assert_pictures(tmp_path, "x", "y", "z")
