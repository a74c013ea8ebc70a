"""docs/claims.md is what docs/claims.py writes, which checks its numbers and pages."""

import collections

import pytest

from tests.support.docs import DOCS, script


@pytest.fixture(scope="module")
def claims():
    return script("claims")


def test_the_page_is_up_to_date(claims):
    text = (DOCS / "claims.txt").read_text()
    assert claims.written(text) == (DOCS / "claims.md").read_text()
    items = collections.Counter((of, cells[0]) for of, cells in claims.rows(text))
    assert len(items) > 110 and set(items.values()) == {1}
    for _, (*_, where, command) in claims.rows(text):
        assert where != "-" or command != "-"


def test_a_command_has_the_environment_of_its_page(claims):
    command = "recipes.smoothness.noisy_shift --network=dln"
    row = f"| Table 1 | 1 | 1 | - | holds | noisy_shift | {command} |"
    page = claims.written(f"## A paper\n\n{row}\n")
    assert f"| `KERAS_BACKEND=jax JAX_ENABLE_X64=1 python -m {command}` |" in page


@pytest.mark.parametrize(
    "cells, message",
    [
        ("1 | {9.99e-99} | exact | holds | blindness | -", "9.99e-99 does not stand"),
        ("1 | 1 | exact | yes | blindness | -", "no such agreement, 'yes'"),
        ("1 | 1 | exact | holds | tests/test_no.py | -", "no tests/test_no.py"),
        ("1 | 1 | exact | holds | - | recipes.no --a=1", "no recipes.no"),
        ("1 | 1 | exact | holds | blindness | recipes.train", "train does not stand"),
        ("{statements_cbn.json:L} | 1 | exact | holds | - | -", "no 'L'"),
        ("1 | 2 | 1 | exact | holds | - | -", "8 cells, not 7"),
    ],
)
def test_what_is_wrong_is_named(claims, cells, message):
    with pytest.raises(ValueError, match=f"^Table 1: .*{message}"):
        claims.written(f"| Table 1 | {cells} |")
