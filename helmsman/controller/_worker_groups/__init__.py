"""Worker groups with declared dispatch, and the allocator of nodes."""
