"""Hardware that does not exist yet: spaces of devices, swept for training and serving (docs/design.md)."""
