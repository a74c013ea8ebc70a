"""A search with small networks, which processes of a cluster can import."""

from recipes import models
from tests.support import small
from tuner.search import search as search_here


def run(settings):
    models.build = small.build
    return search_here(settings)
