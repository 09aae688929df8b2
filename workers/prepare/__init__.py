"""Prepares a model before it is served: an open batch axis that is proven, and FP16 that is compared."""
