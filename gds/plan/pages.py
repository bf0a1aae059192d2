"""Pages of the page cache, which O_DIRECT reads whole. Pure."""

from typing import Final

PAGE_BYTES: Final = 4096


def page_down(offset: int) -> int:
    """Returns the beginning of the offset's page."""
    return offset - offset % PAGE_BYTES


def page_up(offset: int) -> int:
    """Returns the end of the offset's page; the offset itself where a page begins there."""
    return page_down(offset + PAGE_BYTES - 1)
