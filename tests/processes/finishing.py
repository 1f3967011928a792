"""A child that ends when it is told to finish."""

from __future__ import annotations

from argosy.processes.child import channel_to_parent, messages

if __name__ == "__main__":
    next(message for message in messages(channel_to_parent()) if message["kind"] == "finish")
