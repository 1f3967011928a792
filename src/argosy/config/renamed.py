"""Keys of the run file that have another name now, or are gone.

An old name works for one version, with a warning. The run files of older runs have keys that are gone.
"""

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
REMOVED: Mapping[Key, tuple[object, str]] = {
    ("sync", "momentum_every"): (0, "the outer momentum is updated once in as many updates as the run has [[sites]]"),
}
"""Key that is gone -> the value that said what is done now, which is left out; and what that is."""


def is_removed(key: Key, value: object, place: str) -> bool:
    """Return True if a key is gone, and had no effect. Raises: UserError if it had one."""
    if key not in REMOVED:
        return False
    without_effect, now = REMOVED[key]
    if value != without_effect:
        raise UserError(f"{place}{dotted(key)} = {value}: the key is gone; {now}. Remove it.")
    return True


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
