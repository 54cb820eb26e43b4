"""Where environments run: in the driver's threads, or in workers, each a Ray actor that hosts many."""
