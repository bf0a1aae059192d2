"""Eviction: what goes to make space, and what is kept of it elsewhere before."""
