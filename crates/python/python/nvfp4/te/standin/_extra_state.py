"""``transformer_engine.pytorch._extra_state``: what pickles in checkpoints hold."""

from .._extra_state import (
    _RECIPE_POLICIES,
    UNSAFE_PICKLE_EXTRA_STATE_ENV,
    CheckpointExtraStatePolicy,
    should_load_extra_state_pickle,
)

__all__ = [
    "UNSAFE_PICKLE_EXTRA_STATE_ENV",
    "_RECIPE_POLICIES",
    "CheckpointExtraStatePolicy",
    "should_load_extra_state_pickle",
]
