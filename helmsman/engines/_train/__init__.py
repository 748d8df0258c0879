"""Parts of the training engine: meshes, packing, attention, chunked log-probabilities."""
