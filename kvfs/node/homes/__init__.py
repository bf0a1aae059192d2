"""The homes of names: where a cluster has too many for each node to know who holds them all."""
