"""The parameter servers of asynchronous training: processes that hold the weights and make the updates."""
