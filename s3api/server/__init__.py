"""The S3 server: supervisor, workers, the admin port, counts and logs."""
