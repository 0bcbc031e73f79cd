"""Fused CPU kernels, compiled on first use: decoder layers several times faster than torch's small operators."""
