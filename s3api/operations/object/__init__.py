"""Operations on objects and their versions."""
