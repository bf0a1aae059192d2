"""The S3 front door: buckets are top-level directories of the mount, objects are files."""
