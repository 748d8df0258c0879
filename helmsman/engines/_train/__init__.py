"""Parts of the training engine: meshes, packing, attention, losses over chunks."""
