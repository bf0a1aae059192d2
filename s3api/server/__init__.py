"""What serves the S3 API: supervisor, workers, the admin port, counts and logs."""
