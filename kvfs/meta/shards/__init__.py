"""Namespaces with shards of their own in a Redis cluster: a log each."""
