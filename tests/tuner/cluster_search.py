"""A search with small networks, which processes of a cluster can import."""

from recipes import models
from tests.recipes import small
from tuner.search import search


def run(**arguments):
    models.build = small.build
    return search(**arguments)
