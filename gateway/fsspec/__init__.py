"""`kvfs://` for programs that open files by fsspec: pandas, pyarrow, torch, Hugging Face's tools.

Only this package imports fsspec; its users have it anyway (extra `fsspec`).
"""
