"""Portable implementations of every op, chunked, for any backend that JAX runs on."""
