"""The run file: its schema, its presets, and how file and command line become one `RunConfig`."""
