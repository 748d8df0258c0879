"""APIs of other libraries on Helmsman's objects, so that scripts for these libraries run."""
