import pytest

from recipes.engine import figures
from recipes.models import norms


def test_a_norm_has_one_colour_everywhere():
    few, some = figures.colours(["cbn", "bn"]), figures.colours(["lp1", "bn", "cbn"])
    many = figures.colours([*reversed(norms.NORMS), "other", "another"])
    for name in ("bn", "cbn"):
        assert few[name] == some[name] == many[name]
    assert len(set(some.values())) == 3
    assert len({many[name] for name in norms.NORMS}) == len(norms.NORMS)
    assert len({figures.NAME_OF[name] for name in norms.NORMS}) == len(norms.NORMS)
    assert many["other"] != many["another"]
    greens = [green for _, green, _, _ in figures.shades(["a", "b", "c"]).values()]
    assert greens == sorted(greens)


@pytest.mark.parametrize("runs", [[], [[]], [[{"epoch": 1, "v": None}]]])
def test_some_of_which_there_is_nothing_to_draw(tmp_path, runs):
    rows = [("v", "values", {})]
    figures.curves(tmp_path / "1.png", {"a": {"bn": runs}}, rows, "title")
    outcomes = {"a": {"bn": {1.0: [], 2.0: [0.1] * 3}}}
    figures.against(tmp_path / "2.png", outcomes, "x", "y", "title", base=2)
    panels = {"relu": {"layer 1": [[0.1, 0.5], [1.0]], "layer 2": []}}
    figures.distributions(tmp_path / "3.png", panels, (0, 1), "v", "title", (-1, 2))
    assert len(list(tmp_path.iterdir())) == 3
