"""The embedded metadata engine: LMDB with a journal and checkpoints, opened and rebuilt here."""
