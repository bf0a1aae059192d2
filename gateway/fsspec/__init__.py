"""`kvfs://` for programs that open files by fsspec: pandas, pyarrow, torch, Hugging Face's tools.

fsspec is imported here alone; whoever wants it has it anyway (extra `fsspec`).
"""
