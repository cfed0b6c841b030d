"""Hypothesis draws the same examples in every run, and is not timed."""

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None, database=None, max_examples=100)
settings.load_profile("repeatable")
