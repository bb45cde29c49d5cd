"""A pytest plugin: hypothesis always draws the same, and does not shrink what it finds."""

from __future__ import annotations

from hypothesis import Phase, settings

settings.register_profile(
    "mutants",
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.explicit, Phase.generate),
)
