"""Pure decisions of S3: no I/O and no clock, `now` is an argument.

Everything here takes and gives plain values: strings, bytes, numbers, aware datetimes, and the
dicts of botocore's shapes for parsed documents. A refusal raises S3Error."""
