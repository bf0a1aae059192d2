"""Objects in the engine: buckets, keys, versions and uploads, beside the mount that shows them."""
