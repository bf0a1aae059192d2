"""Operations on uploads in parts."""
