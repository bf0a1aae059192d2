"""Pages of the page cache, which O_DIRECT reads whole. Pure."""

from typing import Final

PAGE_BYTES: Final = 4096


def page_down(offset: int) -> int:
    """Where its page begins."""
    return offset - offset % PAGE_BYTES


def page_up(offset: int) -> int:
    """Where its page ends; the offset itself where a page begins there."""
    return page_down(offset + PAGE_BYTES - 1)
