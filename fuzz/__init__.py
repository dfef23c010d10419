"""Hostile bytes for every decoder: targets, a seeded mutator, a corpus, and a coverage-guided runner."""
