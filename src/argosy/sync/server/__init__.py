"""A sharded parameter server, for asynchronous training: what its servers and workers know and say."""
