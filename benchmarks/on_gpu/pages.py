"""Pages."""


def write_pages(folder, docs):
    """Writes."""
