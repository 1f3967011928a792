"""Keys of the run file that have another name now: the old one works for one version, with a warning."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping

from argosy.config.keys import Key, dotted
from argosy.errors import ArgosyWarning, UserError

RENAMED: Mapping[Key, Key] = {
    ("resilience", "examine_s"): ("resilience", "node_check_s"),
    ("resilience", "beat_timeout_s"): ("resilience", "heartbeat_timeout_s"),
    ("resilience", "recompute_every_steps"): ("resilience", "replay_check_every_steps"),
    ("resilience", "memory_every_steps"): ("resilience", "memory_checkpoint_every_steps"),
    ("resilience", "move_for_speed"): ("resilience", "migrate"),
}
"""Old key -> new key, since 0.1; to be removed with 0.3."""


def new_key(key: Key, place: str, beside: Collection[Key] = ()) -> Key:
    """Return what `key` is called now. Warn with `place`, where it was written, if it was called otherwise before.

    beside: the keys that were written in the same place. Raises: UserError if the new one is among them.
    """
    new = RENAMED.get(key)
    if new is None:
        return key
    if new in beside:
        raise UserError(f"{place}{dotted(key)} is called {dotted(new)} now, and both are given. Remove the old one.")
    # No stack level: the line to change is the user's, which the text names.
    text = f"{place}{dotted(key)} is called {dotted(new)} now; the old name will go."
    warnings.warn(text, ArgosyWarning, stacklevel=1)
    return new
