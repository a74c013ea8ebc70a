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
