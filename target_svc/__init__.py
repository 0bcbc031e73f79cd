"""The target worker: weights and pages of the large model, behind one stream of steps."""
