"""Parts of the training engine: meshes, passes, packing, attention, chunked log-probabilities."""
