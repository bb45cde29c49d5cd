"""A pytest plugin: hypothesis draws the same examples in each run, and does not shrink failures."""

from __future__ import annotations

from hypothesis import Phase, settings

settings.register_profile(
    "mutants",
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.explicit, Phase.generate),
)
