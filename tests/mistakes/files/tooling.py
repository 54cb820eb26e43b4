class Shelf:
    """Books."""

    def reset(self, shelf: int) -> str:
        return f"You are at shelf {shelf}."

    def search(self, title: str) -> str:
        """Search the shelf.

        Args:
            title: Title of a book.
        """
        return title


def look_up(word: str) -> str:
    return word


def count(words) -> int:
    """Count words."""
    return len(words)


def page(number: int) -> str:
    """Show a page."""
    return str(number)
